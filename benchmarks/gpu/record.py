"""Sections of the benchmark with their results, errors and omissions, in a file that is written
anew as they grow, and the time that is left for more.
"""

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.options import GpuOptions
from dynamiq_jax._console.records import write_json

Results = dict[str, Any]


class Record:
    """Sections, the time that is left for them, and the file that they go to."""

    def __init__(self, options: GpuOptions, environment: dict[str, Any], started: float):
        self.environment = environment
        self.path = Path(options.output) if options.output else None
        self._options = options
        self._started = started
        self._longest_case = 0.0
        self._sections: dict[str, dict[str, Any]] = {}
        self._section: dict[str, Any] = {}  # the one that runs

    def section(self, name: str, run: Callable[[Results], None]) -> None:
        """Run `run(results)`, which adds to `results` as it goes, and write the file."""
        started = time.perf_counter()
        results: Results = {}
        section: dict[str, Any] = {"status": "ok", "errors": [], "skipped": [], "results": results}
        self._sections[name] = self._section = section
        print(f"\n== {name}", flush=True)
        with self.guard(name):
            if self.may_start(name):
                run(results)
        if section["errors"]:
            section["status"] = "failed"
        elif section["skipped"]:
            section["status"] = "incomplete"
        section["seconds"] = round(time.perf_counter() - started, 2)
        self.write()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Keep an error of the section that runs, and go on."""
        try:
            yield
        except Exception as error:
            lines = traceback.format_exception(error)
            message = f"{type(error).__name__}: {str(error)[:600]}"
            print(f"FAILED {what}: {message}", flush=True)
            self._section["errors"].append(
                {"what": what, "error": message, "traceback": "".join(lines)[-4000:]}
            )

    @contextlib.contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Guard a case and remember its duration."""
        started = time.perf_counter()
        with self.guard(what):
            yield
        self._longest_case = max(self._longest_case, time.perf_counter() - started)

    def may_start(self, what: str) -> bool:
        """Return whether a case as long as the longest so far still fits."""
        left = self._options.minutes * 60 - (time.perf_counter() - self._started)
        if left > self._longest_case:
            return True
        self.skip(what, f"{left:.0f} s are left")
        return False

    def skip(self, what: str, why: str) -> None:
        """Keep what the section that runs leaves out."""
        print(f"skipped {what}: {why}", flush=True)
        self._section["skipped"].append({"what": what, "why": why})

    def write(self) -> None:
        """Write everything so far."""
        if self.path is None:
            return
        record = {
            "environment": self.environment,
            "config": dataclasses.asdict(self._options),
            "timings": "meaningless: interpreted" if self._options.interpret else "device",
            "sections": self._sections,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is cut short here leaves the file of before.
        part = self.path.with_suffix(".part")
        write_json(part, record)
        part.replace(self.path)

    def finish(self) -> int:
        """Print a summary; return 1 if anything failed."""
        seconds = time.perf_counter() - self._started
        statuses = ", ".join(f"{name} {s['status']}" for name, s in self._sections.items())
        print(f"\n{seconds:.0f} s; {statuses}")
        for name, section in self._sections.items():
            for error in section["errors"][:3]:
                print(f"  {name}: {error['what']}: {error['error'][:200]}")
        if self.path:
            print(f"Written to {self.path}")
        return int(any(section["errors"] for section in self._sections.values()))
