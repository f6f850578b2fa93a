"""The first check on several processes, each of which has a part of the arrays."""

import pytest

from tests.support import processes
from tests.support.first_check_worker import AXES, NUM_PROCESSES, errors_of_all

EXPECTED = {
    "mean": "",
    "sum": "a sum over rows",
    "rows": "",
    "wrong role": "give the role 'rows'",
}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str]]:
    """The error of every case in each process."""
    return processes.run(errors_of_all, [()] * NUM_PROCESSES, devices=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transform", ["vmap", "shard_map"])
@pytest.mark.parametrize("over", AXES)
@pytest.mark.parametrize("loss", EXPECTED)
def test_all_processes_have_the_same_answer(errors, loss, over, transform):
    texts = {of_process[f"{loss}, {over}, {transform}"] for of_process in errors}
    assert len(texts) == 1
    (text,) = texts
    assert EXPECTED[loss] in text
    assert bool(text) == bool(EXPECTED[loss])
