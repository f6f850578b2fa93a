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
_TRIPS = re.compile(r"scmp\.ge\.s32\.totalorder %\S+ (?:%\S+, )?(\d+) /\* loop exit")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Bundles of a kernel whose steps are a loop."""

    of_step: int  # in the body of that loop, with every branch taken once
    loops: tuple[tuple[int, int], ...]  # inside it: bundles of a body, and how often it runs
    all: int  # of the program

    def cycles(self, steps: int, *, rare: int = 1, loops_of_step: int = 0) -> int:
        """Return the bundles that run.

        Args:
          steps: steps of the kernel.
          rare: how often loops run that not every step runs.
          loops_of_step: trip count of a loop that every step runs.
        """
        total = self.of_step * steps
        for bundles, trips in self.loops:
            total += bundles * trips * (steps if trips == loops_of_step else rare)
        return total


def write_schedules(folder: Path) -> None:
    """Let the compiler write schedules to a folder. Call it before JAX loads the compiler."""
    flags = " ".join(_FLAGS).format(folder=folder)
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def read_schedule(folder: Path, name: str) -> Schedule:
    """Read the schedule of the kernel of some name that was compiled last."""
    files = folder.glob(f"*-{name}.*-final_bundles.txt")
    text = max(files, key=lambda path: path.stat().st_mtime_ns).read_text()
    depths: list[int] = []
    loops: list[list[int]] = []  # of inner loops: bundles, trips
    for line in text.splitlines():
        if not (match := _BUNDLE.match(line)):
            continue
        depth = match.group(2).count(">")
        depths.append(depth)
        if depth >= 2:
            # The branch of a loop is listed outside of it, and the bundles behind that inside.
            if match.group(1) == "LB" or not loops:
                loops.append([0, 1])
            loops[-1][0] += 1
            if trips := _TRIPS.search(line):
                loops[-1][1] = int(trips.group(1))
    return Schedule(
        of_step=sum(depth == 1 for depth in depths) or len(depths),
        loops=tuple((bundles, trips) for bundles, trips in loops),
        all=len(depths),
    )
