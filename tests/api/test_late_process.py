"""A process that is late, for a checkpoint, its data or a compiler, is waited for."""

import pytest

from tests.support import processes
from tests.support.late_worker import CASES, end_of_first, errors_of_all


@pytest.fixture(scope="module")
def errors() -> list[dict[str, str | None]]:
    """Errors of each function in both processes."""
    return processes.run(errors_of_all, [()] * 2, devices=len(CASES), timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_process_that_is_late_is_waited_for(errors, name):
    assert [of_process[name] for of_process in errors] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("form", ("pmean, all to all", "compress, exact"))
def test_a_compiler_that_takes_long_is_waited_for(form):
    """gloo has 30 s to connect, from the first message of a process on."""
    first, last = processes.run(end_of_first, [(form,)] * 2, timeout=300)
    assert first["error"] is None and last == {"error": None, "warnings": []}
    (warning,) = first["warnings"]
    assert "process 1 had not compiled the same step, for which this process waits." in warning
