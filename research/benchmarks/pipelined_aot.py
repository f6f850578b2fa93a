"""Schedules of pipelined training steps (DeAR) that the compiler makes for several H200, on a
machine without a GPU: the bytes that are gathered under the forward pass, and those that are
scattered under the backward pass.

    python -m research.benchmarks.pipelined_aot

Needs `pip install -e '.[cuda13-aot]'`.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.aot.h200 import progress
from benchmarks.gpu import h200_model as h200
from benchmarks.harness import files
from pallas_kernels.modes import without_gpu
from research.benchmarks import pipelined_aot_step as pipelined_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a table and all problems; return 1 if there are some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8, help="GPUs")
    parser.add_argument("--first", type=int, help="compile the first of the steps alone")
    save = "write the result to research/benchmarks/results/pipelined_h200.json"
    parser.add_argument("--save", action=argparse.BooleanOptionalAction, default=True, help=save)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, without_gpu("compile"):
        h200.prepare(Path(folder))
        rows = [
            pipelined_step.examine(case, options.workers, Path(folder))
            for case in progress("step", pipelined_step.CASES[: options.first])
        ]
    pipelined_step.print_steps(rows, options.workers)
    problems = [f"{row['topology']}: {problem}" for row in rows for problem in row["problems"]]
    for problem in problems:
        print(f"Off: {problem}")
    if options.save:
        results = {"target": "NVIDIA H200", "steps": rows}
        path = files.path_of("research/pipelined_h200")
        print(f"Written to {files.write(path, vars(options), results)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
