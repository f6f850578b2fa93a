"""A process that is late, for a checkpoint or its data, is waited for by every function."""

import pytest

from tests.support import processes
from tests.support.late_worker import CASES, errors_of_all


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str | None]]:
    """Errors of each function in both processes."""
    return processes.run(errors_of_all, [()] * 2, devices=len(CASES), timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_late_is_waited_for(errors, name):
    assert [of_process[name] for of_process in errors] == [None, None]
