"""Speed of the kernels for NVIDIA GPUs, Triton and Mosaic GPU, beside what users have instead.

    python -m benchmarks.gpu.kernels

Needs JAX with CUDA, nothing but what the library needs besides, and no installation. Correctness
comes first: every operation against its XLA twin, on hard rows, as `dynamiq-jax verify` compares
them. Yardsticks are measured in the same run: a device-to-device copy, XLA's own fusion of the same
maths, an int8 block quantizer, and casts to MXFP8. Results are written after every section, so that
a run that is cut short leaves what it had.

A time is that of back-to-back calls over their number, in a batch long enough to hide the host; the
median of several batches. Where a call is shorter than the host needs to start one, that is what
the figure shows: such rows are marked. The section `profiler` has the times of the device alone.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence

import jax

from benchmarks.gpu import correctness, device, profiling, speed
from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.jobs import implementations, left_out
from benchmarks.gpu.options import GpuOptions, parse
from benchmarks.gpu.record import Record, Results
from benchmarks.harness import files
from pallas_kernels.modes import without_gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sections; return 1 if one failed or a kernel was wrong.

    Raises:
      SystemExit: no kernel can run here, and none is interpreted.
    """
    started = time.perf_counter()
    options = parse(__doc__, arguments)
    if options.interpret:  # compiling is then most of the time
        jax.config.update("jax_disable_most_optimizations", True)
    with without_gpu("interpret") if options.interpret else contextlib.nullcontext():
        if len(implementations()) == 1:  # the base
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out().items())
            raise SystemExit(
                f"No kernel for GPUs can run here: {reasons}. Run on a machine with an NVIDIA GPU, "
                "or give --interpret to try the script."
            )
        environment = files.environment() | device.facts() | {"left_out": left_out()}
        print(" ".join(f"{k}={v}" for k, v in environment.items()), flush=True)
        if options.interpret:
            print("INTERPRETED: no time below means anything")
        record = Record(options, environment, started)
        bench = GpuBench(options, record)
        for name, run in sections(options).items():
            record.section(name, functools.partial(run, bench))
    return record.finish()


def sections(options: GpuOptions) -> dict[str, Callable[[GpuBench, Results], None]]:
    """Return the sections in the order in which they run: what matters least comes last."""
    first, others = options.sizes[:1], options.sizes[1:]
    bits, other_bits = options.bits[:1], options.bits[1:]
    return {
        "device": device.measure,
        "correctness": correctness.check,
        "main": functools.partial(speed.measure, sizes=first, bits=bits),
        "prediction": device.predict,
        "all_reduce": correctness.simulate,
        "profiler": profiling.profile,
        "sweep": speed.sweep,
        "bits": functools.partial(speed.measure, sizes=first, bits=other_bits),
        # Size by size: what is left out when time is short is the largest.
        "sizes": functools.partial(speed.measure, sizes=others, bits=options.bits_of_sizes),
    }


if __name__ == "__main__":
    sys.exit(main())
