"""Schedules of Pallas kernels for TPUs, as the compiler writes them to files.

A TPU core issues the instructions of its units in bundles, in an order that is fixed when a kernel
is compiled. So the bundles that run are cycles, but for waits for memory.
"""

import dataclasses
import os
import re
from pathlib import Path

_FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=.*final.*",
    "--xla_tpu_check_llo_types=false",  # it fails on vectors of floats that hold integers
)
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT|)\s*:((?:\s*>)*)")
_TRIPS = re.compile(r"scmp\.ge\.s32\.totalorder (?:\(%\S+\), )?%\S+ (\d+) /\* loop exit")


@dataclasses.dataclass
class Loop:
    """A loop of a kernel, or all of it."""

    trips: int | None = None
    bundles: int = 0  # of its body, outside of inner loops, with every branch taken once
    inner: list["Loop"] = dataclasses.field(default_factory=list)

    @property
    def cycles(self) -> int:
        """Bundles that run."""
        return (self.trips or 1) * (self.bundles + sum(loop.cycles for loop in self.inner))

    @property
    def all(self) -> int:
        """Bundles of the code."""
        return self.bundles + sum(loop.all for loop in self.inner)


@dataclasses.dataclass(frozen=True)
class BundleSchedule:
    """Bundles of a kernel, whose steps are a loop if there are several."""

    program: Loop

    @property
    def of_step(self) -> int:
        """Bundles of a step, outside of inner loops."""
        return sum(step.bundles for step in self._steps)

    def cycles(self, steps: int, *, rare: int = 1, loops_of_step: int = 0) -> int:
        """Return the bundles that run.

        Args:
          steps: steps of the kernel.
          rare: how often loops run that not every step runs.
          loops_of_step: trip count of a loop that every step runs.
        """
        if steps == 1:
            return self.program.cycles
        inner = [loop for step in self._steps for loop in step.inner]
        times = (steps if loop.trips == loops_of_step else rare for loop in inner)
        return self.of_step * steps + sum(
            loop.cycles * count for loop, count in zip(inner, times, strict=True)
        )

    @property
    def _steps(self) -> list[Loop]:
        return self.program.inner or [self.program]


def write_schedules(folder: Path) -> None:
    """Let the compiler write schedules to a folder. Call it before JAX loads the compiler."""
    flags = " ".join(_FLAGS).format(folder=folder)
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def read_schedule(folder: Path, name: str) -> BundleSchedule:
    """Read the schedule of the kernel of some name that was compiled last."""
    files = folder.glob(f"*-{name}.*-final_bundles.txt")
    text = max(files, key=lambda path: path.stat().st_mtime_ns).read_text()
    stack = [Loop()]
    for line in text.splitlines():
        if not (match := _BUNDLE.match(line)):
            continue
        depth = match.group(2).count(">")
        begins = match.group(1) == "LB" and depth > 0
        del stack[depth if begins else depth + 1 :]
        while len(stack) <= depth:
            # The branch of a loop is listed outside of it, and the bundles behind that inside.
            if begins or not stack[-1].inner:
                stack[-1].inner.append(Loop())
            stack.append(stack[-1].inner[-1])
        stack[-1].bundles += 1
        # An outer loop may end in the last bundles of an inner one.
        for trips in _TRIPS.findall(line):
            open_loops = [loop for loop in stack[1:] if loop.trips is None]
            if open_loops:
                open_loops[-1].trips = int(trips)
    return BundleSchedule(stack[0])
