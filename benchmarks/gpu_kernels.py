"""Speed of the Triton kernels on an NVIDIA GPU, beside what a user would compare them with.

    python benchmarks/gpu_kernels.py

Needs JAX with CUDA and numpy, and no installation. Correctness comes first: against the XLA twin of
every kernel, and against a float64 sum. Yardsticks are measured in the same run: a device-to-device
copy, XLA's own fusion of the same maths, an int8 block quantizer, and casts to MXFP8. Results are
written after every section, so that a run that is cut short leaves what it had.

A time is that of back-to-back calls over their number, in a batch long enough to hide the host; the
median of several batches. Where a call is shorter than the host needs to start one, that is what
the figure shows: such rows are marked, and the profiler's own times are in the last section.
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_STARTED = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]

# The parts are in gpu/; what each is for is in gpu/__init__.py.
import jax

from benchmarks import common
from benchmarks.gpu import (
    all_reduce,
    correctness,
    device,
    plot,
    prediction,
    profiling,
    speed,
    sweep,
)
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.options import Options
from benchmarks.gpu.record import Record, Results
from dynamiq_jax.methods import DynamiQ
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE
from pallas_kernels.implementation import without_gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all sections; the exit status tells whether one failed or a kernel was wrong."""
    options = parse(arguments)
    if options.interpret:  # compiling is then most of the time
        jax.config.update("jax_disable_most_optimizations", True)
    with without_gpu("interpret") if options.interpret else contextlib.nullcontext():
        environment = common.environment() | device.facts()
        print(" ".join(f"{k}={v}" for k, v in environment.items()), flush=True)
        if options.interpret:
            print("INTERPRETED: no time below means anything")
        record = Record(options, environment, _STARTED)
        bench = Bench(options, record)
        for name, run in sections(options).items():
            record.section(name, functools.partial(run, bench))
        plot.save(bench)
    return record.finish()


def sections(options: Options) -> dict[str, Callable[[Bench, Results], None]]:
    """In the order in which they run: what matters least comes last."""
    first, others = options.sizes[:1], options.sizes[1:]
    bits, other_bits = options.bits[:1], options.bits[1:]
    return {
        "device": device.measure,
        "correctness": correctness.check,
        "main": functools.partial(speed.measure, sizes=first, bits=bits),
        "prediction": prediction.predict,
        "sweep": sweep.sweep,
        "all_reduce": all_reduce.simulate,
        "bits": functools.partial(speed.measure, sizes=first, bits=other_bits),
        # Size by size: what is left out when time is short is the largest.
        "sizes": functools.partial(speed.measure, sizes=others, bits=options.bits_of_sizes),
        "profiler": profiling.profile,
    }


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=float, nargs="+", default=[128, 16, 1024], help="Mi coordinates")
    add("--bits", type=float, nargs="+", default=[5, 3, 8, 4, 6, 7], help="the first matters most")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the gradient")
    add("--rows", type=int, nargs="+", default=[4, 8, 16, 32], help="of the sweep")
    add("--warps", type=int, nargs="+", default=[2, 4, 8], help="of the sweep")
    add("--workers", type=int, default=8, help="of the simulated all-reduce")
    add("--minutes", type=float, default=7.5, help="what does not fit is left out")
    add("--batches", type=int, default=7, help="of calls; the median batch counts")
    add("--instructions-per-coordinate", type=float, default=53, help="of a hop, to predict with")
    add("--clock-mhz", type=float, help="of the multiprocessors; else nvidia-smi's largest")
    add("--small", action="store_true", help="tiny sizes, to try the script")
    add("--interpret", action="store_true", help="without a GPU: slowly, and no time means much")
    add("--output", help="JSON; without it benchmarks/results/gpu_kernels.json (small: none)")
    given = parser.parse_args(arguments)
    # Tiny sizes are no result to keep.
    default = None if given.interpret or given.small else str(common.RESULTS / "gpu_kernels.json")
    small = given.small
    row = SUPER_GROUP_SIZE
    return Options(
        sizes=(64 * row, 48 * row) if small else tuple(int(s * 2**20) for s in given.sizes),
        bits=(5.0, 3.0) if small else tuple(given.bits),
        bits_of_sizes=(5.0,) if small else tuple(given.bits),
        dtypes=tuple(given.dtypes),
        widths=(2, 8) if small else DynamiQ.widths,  # few widths compile faster
        sweep_rows=(8,) if small else tuple(given.rows),
        sweep_warps=(4,) if small else tuple(given.warps),
        check_bits=(5.0,) if small else (5.0, 3.0, 8.0, 12.0),
        # Three ragged chunks: blocks overhang, and rows are padded.
        check_size=100 * row + 7 if small else 4 * 2**20 + 7 * row + 7,
        workers=min(given.workers, 4) if small else given.workers,
        worker_size=64 * row if small else 4 * 2**20,
        copy_bytes=2**20 if small else 2 * 2**30,
        batches=2 if small else given.batches,
        batch_seconds=0.0 if small else 0.02,
        warm_seconds=0.0 if small else 0.1,
        minutes=given.minutes,
        instructions_per_coordinate=given.instructions_per_coordinate,
        clock_mhz=given.clock_mhz,
        interpret=given.interpret,
        output=given.output or default,
    )


if __name__ == "__main__":
    sys.exit(main())
