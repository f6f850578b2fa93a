"""Speed of the native codec beside the base: nanoseconds per coordinate of every operation.

    python -m benchmarks.speed.native

Each number of threads has a process of its own, on as many cores. Calls of both backends alternate,
so that other work on the machine slows both; the ratio is the median of those of neighboring calls.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common
from dynamiq_jax._measurement.gradients import worker_gradient
from pallas_kernels import _native, operations
from pallas_kernels.codec import LocalRows, place_rows
from pallas_kernels.codec.scales import bfloat16_bits

BACKENDS = ("xla", "native")
_INSIDE = "DYNAMIQ_BENCHMARK_THREADS"  # of a process that measures


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    size: int = 8 * 2**20  # coordinates of the bucket
    chunks: int = 4  # of the bucket: `compress` and `hop` work on one of them
    bits: float = 5.0  # budget
    dtype: str = "float32"  # of the gradient: float32, bfloat16 or float16
    threads: tuple[int, ...] = (1, 2)  # of XLA, and cores
    repeats: int = 15  # timed calls of each operation; medians count
    save: bool = True  # write the result to benchmarks/results/native.json


def main(config: Config) -> None:
    """Time every operation and print a table."""
    if reason := _native.why_not():
        sys.exit(f"There is no native codec to measure: {reason}.")
    if threads := os.environ.get(_INSIDE):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
        sys.stdout.write(json.dumps(measure(config)))
        return
    console = Console()
    results = []
    for count in config.threads:
        results += [{"threads": count, **row} for row in _in_process(config, count)]
    size = f"{config.size / 2**20:g} Mi {config.dtype} coordinates"
    table = Table(title=f"{size}, {config.bits:g} bits")
    table.add_column("operation")
    for heading in ("threads", "base", "native", "base / native"):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            row["operation"],
            str(row["threads"]),
            *(f"{row[name]:.2f} ns" for name in BACKENDS),
            f"{row['ratio']:.2f}",
        )
    console.print(table)
    if config.save:
        console.print(f"Written to {common.save('native', dataclasses.asdict(config), results)}")


def _in_process(config: Config, threads: int) -> list[dict[str, Any]]:
    """Measure in a process that has some threads, and as many cores."""
    given = (f"--{name}={getattr(config, name)}" for name in ("size", "chunks", "bits", "dtype"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.native", *given, f"--repeats={config.repeats}"],
        env={
            **os.environ,
            _INSIDE: str(threads),
            "PJRT_NPROC": str(threads),
            "JAX_PLATFORMS": "cpu",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def measure(config: Config) -> list[dict[str, Any]]:
    """Return the nanoseconds per coordinate of both backends, for every operation."""
    layout = dq.DynamiQ(bits=config.bits).layout(config.size, num_chunks=config.chunks)
    rows = [
        layout.as_rows(jnp.asarray(worker_gradient(worker, config.size, seed=0), config.dtype))
        for worker in range(2)
    ]
    norms = operations.statistics(rows[0], implementation="xla")
    places = jax.jit(lambda norms: place_rows(bfloat16_bits(norms), layout))(norms)
    ours, other = (LocalRows(each, places, jnp.array([1, 2], jnp.uint32)) for each in rows)
    first = jax.jit(functools.partial(operations.compress, layout=layout, implementation="xla"))
    messages = jnp.stack([first(other, chunk, 0) for chunk in range(config.chunks)])
    part = config.size / config.chunks
    cases: dict[str, tuple[tuple[Any, ...], float]] = {
        "statistics": ((rows[0],), config.size),
        "compress": ((ours, 1, 0), part),
        "hop": ((messages[1:2], ours, 1, 1), part),
        "decompress_accumulate": ((messages[1:2], ours, 1), part),
        "decompress": ((messages, places), config.size),
    }
    results = []
    for name, (arguments, size) in cases.items():
        static = {} if name == "statistics" else {"layout": layout}
        calls = [
            functools.partial(
                jax.jit(
                    functools.partial(getattr(operations, name), implementation=backend, **static)
                ),
                *arguments,
            )
            for backend in BACKENDS
        ]
        seconds = _paired(calls, config.repeats)
        ratio = statistics.median(base / native for base, native in seconds)
        medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
        ns = {name: 1e9 * value / size for name, value in zip(BACKENDS, medians, strict=True)}
        results.append({"operation": name, **ns, "ratio": ratio})
    return results


def _paired(calls: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Return the seconds of each call, in turns."""
    for call in calls:
        jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        turn = []
        for call in calls:
            start = time.perf_counter()
            jax.block_until_ready(call())
            turn.append(time.perf_counter() - start)
        seconds.append(turn)
    return seconds


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
