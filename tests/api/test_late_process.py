"""A process that is late, for a checkpoint or its data, is waited for by every function."""

import json

import pytest

from tests.support import processes
from tests.support.late_worker import CASES


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict[str, str | None]]:
    """Errors of each function in both processes."""
    folder = tmp_path_factory.mktemp("late")
    targets = [folder / f"{rank}.json" for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "TIMEOUT", 900)
        processes.run("late_worker.py", [(target,) for target in targets])
    return [json.loads(target.read_text()) for target in targets]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_late_is_waited_for(errors, name):
    assert [of_process[name] for of_process in errors] == [None, None]
