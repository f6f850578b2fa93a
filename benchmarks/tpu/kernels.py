"""Speed of the kernels on a TPU, beside a copy of memory and the sums of XLA.

    python -m benchmarks.tpu.kernels

Needs JAX for TPUs, nothing but what the library needs besides, and no installation. Correctness
comes first: every operation of every backend that can run here against the base, on hard rows, as
`dynamiq-jax verify` compares them. Then every operation is timed at each size, dtype and number of
bits, and an all-reduce over all chips beside `jax.lax.psum` and a ring of BF16. The file of the
results is written after each part, so that a run that is cut short leaves what it had.

On a machine without a TPU, `--interpret --small` tries the script, with times that mean nothing.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import files
from benchmarks.harness.batches import Batches, copy_speed
from benchmarks.tpu.speed import measure_kernels
from dynamiq_jax._measurement.all_reduce import measure
from dynamiq_jax._measurement.devices import make_mesh
from dynamiq_jax._measurement.kernel_checks import (
    BASE,
    CASES,
    INTERPRETED_CASES,
    KernelVerdict,
    check_kernels,
)
from dynamiq_jax._measurement.settings import DEFAULTS, parse_settings
from dynamiq_jax._prediction.break_even import record
from pallas_kernels.modes import without_gpu
from pallas_kernels.registry import BACKENDS

_TIMEOUT = 300.0  # seconds for the compiler and the run of one operation


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; return 1 if an output is wrong."""
    options = _parse(arguments)
    results: dict[str, Any] = {"timings": "meaningless" if options.interpret else "device"}
    path = Path(options.output)

    def keep(**part: Any) -> None:
        results.update(part)
        files.write(path, vars(options), results)

    checks = check_kernels(
        tuple(BACKENDS),
        options.cases,
        interpret=options.interpret,
        timeout=_TIMEOUT,
        done=lambda name: print(name, flush=True),
    )
    for check in checks:
        if check.verdict > KernelVerdict.SAME:
            print(f"{check.name}: {check.verdict.name.lower()} {check.text}", flush=True)
    keep(checks=[check.row() for check in checks])
    wrong = {check.backend for check in checks if check.verdict > KernelVerdict.ROUNDING}
    with without_gpu("interpret") if options.interpret else contextlib.nullcontext():
        _time_operations(options, [name for name in BACKENDS if name not in wrong], keep)
    if jax.device_count() > 1:
        _time_sums(options, keep)
    print(f"Written to {path}")
    return int(bool(wrong))


def _time_operations(options: argparse.Namespace, backends: Sequence[str], keep: Any) -> None:
    here = [name for name in backends if name == BASE or not BACKENDS[name].why_not_here()]
    batches = Batches(2, 0.0, 0.0) if options.small else Batches()
    copy = copy_speed(options.copy_bytes, batches)
    print(f"copy: {copy / 1e9:.0f} GB/s read and written", flush=True)
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for bits in options.bits:
            for dtype in options.dtypes:
                speeds = [
                    speed
                    for name in here
                    for speed in measure_kernels(
                        name, size, dtype=dtype, bits=bits, copy=copy, batches=batches
                    )
                ]
                for speed in speeds:
                    print(
                        f"{size / 2**20:8.4g} Mi {bits:g} bits {dtype:>8} {speed.operation:>10} "
                        f"{speed.backend:>10}: {1e6 * speed.seconds:9.1f} us, "
                        f"{speed.of_copy:.3f} of copy",
                        flush=True,
                    )
                rows += map(dataclasses.asdict, speeds)
                keep(copy_bytes_per_second=copy, operations=rows)


def _time_sums(options: argparse.Namespace, keep: Any) -> None:
    mesh, settings = make_mesh(jax.devices()), parse_settings(DEFAULTS)
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        sums = measure(settings, mesh, size, repeats=options.repeats, done=lambda _: None)
        for result in sums:
            print(f"{size / 2**20:8.4g} Mi {result.setting}: {1e3 * result.seconds:.3f} ms")
        rows += [record(result, sums, None, 1) for result in sums]
        keep(all_reduce=rows)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=float, nargs="+", default=[8, 64, 1], help="Mi coordinates")
    add("--bits", type=float, nargs="+", default=[5, 4, 8], help="of a coordinate on the wire")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the gradient")
    add("--cases", nargs="+", choices=tuple(CASES), help="rows to compare on; else all")
    add("--repeats", type=int, default=9, help="timed calls of each all-reduce")
    add("--small", action="store_true", help="tiny sizes, to try the script")
    add("--interpret", action="store_true", help="without a TPU: slowly, and no time means much")
    add("--output", default=str(files.path_of("tpu_kernels")), help="JSON file")
    options = parser.parse_args(arguments)
    row = 256
    options.sizes = [64 * row] if options.small else [int(s * 2**20) for s in options.sizes]
    options.bits = options.bits[:1] if options.small else options.bits
    options.copy_bytes = 2**20 if options.small else 2**30
    options.cases = options.cases or list(INTERPRETED_CASES if options.interpret else CASES)
    return options


if __name__ == "__main__":
    sys.exit(main())
