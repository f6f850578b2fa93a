"""The first check on several processes, each of which has a part of the arrays."""

import pytest

from tests.support import processes
from tests.support.first_check_worker import AXES, NUM_PROCESSES, errors_of
from tests.support.selection import tried

EXPECTED = {
    "mean": "",
    "sum": "a sum over rows",
    "rows": "",
    "wrong role": "give the role 'rows'",
}


@pytest.fixture(scope="module")
def errors(request) -> list[dict[tuple[str, str, str], str]]:
    """The error of every case in each process."""
    cases = sorted(tried(request, "loss", "over", "transform"))
    return processes.run(errors_of, [(cases,)] * NUM_PROCESSES, devices=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transform", ["vmap", "shard_map"])
@pytest.mark.parametrize("over", AXES)
@pytest.mark.parametrize("loss", EXPECTED)
def test_all_processes_have_the_same_answer(errors, loss, over, transform):
    texts = {of_process[loss, over, transform] for of_process in errors}
    assert len(texts) == 1
    (text,) = texts
    assert EXPECTED[loss] in text
    assert bool(text) == bool(EXPECTED[loss])
