"""Seconds that the tests of each file spend in JAX: `pytest --compile-times`.

    file                          tests    all   trace   lower  compile  programs
    conformance/test_methods.py      90   31.2    14.1     5.2      6.0       212

The events are those of `jax.monitoring`, in the process of the tests: a program that the cache of
compiled programs has is loaded, and counts as compiled in little time. Other processes that a test
starts count in the time of all alone.
"""

import collections
from pathlib import Path
from typing import Any

import jax
import pytest

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
COLUMNS = ("tests", "all", *EVENTS.values(), "programs")
KEY = "compile_times"  # of what a worker of pytest-xdist hands over


class CompileTimes:
    """Plugin of pytest."""

    def __init__(self) -> None:
        self.files: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self._file = ""
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_: Any) -> None:
        if event in EVENTS and self._file:
            self.files[self._file][EVENTS[event]] += seconds
            self.files[self._file]["programs"] += EVENTS[event] == "compile"

    def pytest_runtest_logstart(self, location: tuple[str, int | None, str]) -> None:
        self._file = location[0]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A controller of pytest-xdist sees the reports of all workers, which hand over theirs.
        if not hasattr(report, "node"):
            self.files[report.location[0]]["all"] += report.duration
            self.files[report.location[0]]["tests"] += report.when == "call"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            found = {file: dict(times) for file, times in self.files.items()}
            session.config.workeroutput[KEY] = found

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, times in getattr(node, "workeroutput", {}).get(KEY, {}).items():
            self.files[file].update(times)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("seconds in JAX, by file")
        folders: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for file, times in self.files.items():
            folders[str(Path(file).parent)].update(times)
        for rows in (self.files, folders):
            terminalreporter.write_line(f"{'':50}" + "".join(f"{name:>10}" for name in COLUMNS))
            for name, times in sorted(rows.items(), key=lambda row: -row[1]["all"]):
                whole = (f"{times[column]:10.0f}" for column in COLUMNS)
                terminalreporter.write_line(f"{name:50}" + "".join(whole))
