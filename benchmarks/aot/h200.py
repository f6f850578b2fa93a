"""Checks with the compiler for H200, but no GPU: registers, spills, bytes and instructions of every
kernel, and the overlap of transfers and kernels in programs for several GPUs.

    python -m benchmarks.aot.h200

Compiles the Triton and Mosaic GPU kernels for one H200, and a compressed `pmean` for several, on a
machine that needs no GPU; and a training step whose gradients are reduced in one bucket, or in
several under the backward pass, also by casts of parameters and inside a scan over layers. Exits
with 1 where a figure is off, and says which:

- a kernel spills registers, or an operation takes more than one kernel;
- it touches over 10 % more memory than it must: gradient, message received, message sent;
- one of Triton's does not read or write four neighboring coordinates of a gradient at once (f32:
  128 bits);
- a hop on several GPUs takes more than one kernel;
- with several buckets, hardly a byte of gradient travels under a matmul of the backward pass.

Instructions are counted in the machine code, with all branches: a block takes the one for widths
up to 8 or the one for wider rows. In rows "widths to 8" the method has no wider ones, and Mosaic's
kernel no branch for them; of its hops only those are counted. The budget is how many instructions
can be issued while memory moves the bytes of a coordinate, at best clock and bandwidth; slots are
how many it takes, as the busiest pipe may need longer than to issue all.

It needs the CUDA plugin of the same version as JAX and the CUDA compiler, but neither a driver nor
the CUDA libraries: pip install -e '.[cuda13-aot]'.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.aot import kernels, pmean, training_step
from benchmarks.gpu import h200_model as h200
from benchmarks.harness import files
from dynamiq_jax.topologies import TOPOLOGIES
from pallas_kernels.modes import without_gpu

Item = TypeVar("Item")


def all_topologies() -> list[str]:
    """Return the topologies of this version, with the options that matter here."""
    return [*TOPOLOGIES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print tables and all problems; return 1 if there are some."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder, without_gpu("compile"):
        dump = Path(folder)
        h200.prepare(dump)
        cases = kernels.cases(options.dtypes, options.size, options.workers)
        cases = [
            case for case in cases if not options.operations or case.operation in options.operations
        ]
        rows = [kernels.examine(case, dump) for case in progress("kernel", cases)]
        kernels.print_tables(rows)
        means = [
            pmean.examine(name, options.workers, options.leaf_sizes, dump)
            for name in progress("pmean", options.topologies)
        ]
        pmean.print_means(means, options.workers)
        steps = [
            training_step.examine(case, options.workers, dump)
            for case in progress("training step", training_step.cases(options.steps))
        ]
        training_step.print_steps(steps, options.workers)
    problems = [
        f"{row['backend']} {kernels.name_of(row)}: {p}" for row in rows for p in row["problems"]
    ]
    problems += [f"{row['topology']}: {problem}" for row in means for problem in row["problems"]]
    problems += [
        f"training step, {row['topology']}, {row['form']}: {problem}"
        for row in steps
        for problem in row["problems"]
    ]
    for problem in problems:
        print(f"Off: {problem}")
    if options.save:
        results = {"target": "NVIDIA H200", "kernels": rows, "pmean": means, "steps": steps}
        print(f"Written to {files.write(files.path_of('aot_h200'), vars(options), results)}")
    return 1 if problems else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of the gradient")
    add("--operations", nargs="*", default=[], help="to compile alone; all if none are given")
    add("--size", type=int, default=2**27, help="coordinates of the bucket of the kernels")
    add("--workers", type=int, default=8, help="GPUs; also chunks of that bucket")
    add("--topologies", nargs="*", default=all_topologies(), help="of the pmean")
    sizes = [2**24, 2**22, 1000]
    add("--leaf-sizes", type=int, nargs="*", default=sizes, help="coordinates of its leaves")
    steps = list(training_step.TOPOLOGIES)
    add("--steps", nargs="*", default=steps, help="of training: topologies, or exact (lax.pmean)")
    save = "write the result to benchmarks/results/aot_h200.json"
    add("--save", action=argparse.BooleanOptionalAction, default=True, help=save)
    return parser.parse_args(arguments)


def progress(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield items, with a line for each on a terminal. Not on standard output, which the compiler
    writes to.
    """
    for number, item in enumerate(items, start=1):
        if sys.stderr.isatty():
            print(f"\r{what} {number} of {len(items)}  ", end="", file=sys.stderr, flush=True)
        yield item
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
