"""Options of the benchmark of the GPU kernels."""

import argparse
import dataclasses
from collections.abc import Sequence

from benchmarks.harness import files
from dynamiq_jax._measurement.kernel_checks import CASES
from dynamiq_jax.methods import DynamiQ
from pallas_kernels.codec import SUPER_GROUP_SIZE


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Sizes, bits and durations. The tiny sizes of `--small` try the script, not the kernels."""

    sizes: tuple[int, ...]  # coordinates; the first is the one that matters most
    bits: tuple[float, ...]  # the first is the one that matters most
    bits_of_sizes: tuple[float, ...]  # of all sizes but the first
    dtypes: tuple[str, ...]
    sweep_rows: tuple[int, ...]
    sweep_warps: tuple[int, ...]
    check_cases: tuple[str, ...]  # of `dynamiq-jax verify`
    workers: int
    worker_size: int  # coordinates of each simulated worker
    copy_bytes: int
    batches: int
    batch_seconds: float
    warm_seconds: float
    minutes: float
    instructions_per_coordinate: float
    clock_mhz: float | None
    interpret: bool
    output: str | None

    def method(self, bits: float, implementation: str | None = None) -> DynamiQ:
        """Return the method that is measured."""
        return DynamiQ(bits=bits, implementation=implementation)


def parse(description: str | None, arguments: Sequence[str] | None) -> GpuOptions:
    """Parse the command line.

    Args:
      description: text of the help.
      arguments: the command line; None for that of this process.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=float, nargs="+", default=[128, 16, 1024], help="Mi coordinates")
    add("--bits", type=float, nargs="+", default=[5, 3, 8, 4, 6, 7], help="the first matters most")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the gradient")
    add("--rows", type=int, nargs="+", default=[4, 8, 16, 32], help="of the sweep")
    add("--warps", type=int, nargs="+", default=[2, 4, 8], help="of the sweep")
    add("--cases", nargs="+", default=list(CASES), help="of the check, as of `dynamiq-jax verify`")
    add("--workers", type=int, default=8, help="of the simulated all-reduce")
    add("--minutes", type=float, default=7.5, help="what does not fit is left out")
    add("--batches", type=int, default=7, help="of calls; the median batch counts")
    add("--instructions-per-coordinate", type=float, default=41, help="of a hop, to predict with")
    add("--clock-mhz", type=float, help="of the multiprocessors; else nvidia-smi's largest")
    add("--small", action="store_true", help="tiny sizes, to try the script")
    add("--interpret", action="store_true", help="without a GPU: slowly, and no time means much")
    add("--output", help="JSON; without it benchmarks/results/gpu_kernels.json (small: none)")
    given = parser.parse_args(arguments)
    # Tiny sizes are no result to keep.
    default = None if given.interpret or given.small else str(files.path_of("gpu_kernels"))
    small = given.small
    row = SUPER_GROUP_SIZE
    return GpuOptions(
        sizes=(64 * row,) if small else tuple(int(s * 2**20) for s in given.sizes),
        bits=(5.0,) if small else tuple(given.bits),
        bits_of_sizes=(5.0,) if small else tuple(given.bits),
        dtypes=tuple(given.dtypes),
        sweep_rows=(8,) if small else tuple(given.rows),
        sweep_warps=(4,) if small else tuple(given.warps),
        check_cases=("two widths",) if small else tuple(given.cases),
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
