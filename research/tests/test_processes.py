"""Processes that do not run the same collective hear of it, and a late one is waited for."""

import pytest

from research.tests.support.processes_worker import DIFFERING, LATE, differing_errors, late_errors
from tests.support import processes


@pytest.fixture(scope="module")
def found() -> list[dict]:
    """The errors of each case in both processes."""
    return processes.run(differing_errors, [(2,)] * 2)


@pytest.mark.parametrize("name", DIFFERING)
def test_both_processes_hear_what_differs(found, name):
    (error,) = {of_process[name]["error"] for of_process in found}
    field, of_one, of_others = DIFFERING[name][2]
    assert f"  {field}: {of_others} in process 0; {of_one} in process 1\n" in error
    assert len(error.splitlines()) == 3  # nothing else differs


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str | None]]:
    """Errors of each function in both processes."""
    return processes.run(late_errors, [()] * 2, devices=len(LATE), timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_a_process_that_is_late_is_waited_for(errors, name):
    assert [of_process[name] for of_process in errors] == [None, None]
