"""Speed of the native codec beside the base: nanoseconds per coordinate of every operation.

    python -m benchmarks.speed.native

Each number of threads has a process of its own, on as many cores, and so has memory that is kept
between calls. Calls of both backends alternate, so that other work on the machine slows both; the
ratio is the median of those of neighboring calls. The last operation is all that one worker of a
ring does in an all-reduce, without its messages.
"""

import dataclasses
import functools
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.operations import operation_of
from benchmarks.harness.processes import in_process
from benchmarks.harness.timing import in_turns, median_ratio
from dynamiq_jax._measurement.gradients import worker_gradient
from pallas_kernels import _native, operations
from pallas_kernels.codec import Layout, LocalRows, place_rows
from pallas_kernels.codec.scales import bfloat16_bits

BACKENDS = ("xla", "native")
_WORKER = "all of a worker"


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


COLUMNS = (
    Column("operation", "operation"),
    Column("threads", "threads"),
    Column("memory", lambda row: "kept" if row["kept"] else "new"),
    *(Column(name, name, "{:.2f} ns") for name in BACKENDS),
    Column("xla / native", "ratio", "{:.2f}"),
)


@benchmark("native")
def main(config: Config) -> Report:
    """Time every operation."""
    if reason := _native.why_not():
        sys.exit(f"There is no native codec to measure: {reason}.")
    results = []
    for threads, kept in itertools.product(config.threads, (False, True)):
        environment = {"PJRT_NPROC": str(threads), "JAX_PLATFORMS": "cpu"}
        options = dataclasses.asdict(config)
        rows = in_process(measure, threads, kept, options, environment=environment)
        results += [{"threads": threads, "kept": kept, **row} for row in rows]
    title = f"{config.size / 2**20:g} Mi {config.dtype} coordinates, {config.bits:g} bits"
    return Report(results=results, shown=[table(title, COLUMNS, results)])


def measure(threads: int, kept: bool, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the nanoseconds per coordinate of both backends, for every operation.

    Args:
      threads: number of the cores that this process keeps.
      kept: whether malloc keeps memory between calls.
      options: fields of `Config`.
    """
    if kept and not dq.keep_memory():
        sys.exit("keep_memory() changed nothing: see its documentation.")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    config = Config(**options)
    layout = dq.DynamiQ(bits=config.bits).layout(config.size, num_chunks=config.chunks)
    rows = [
        layout.as_rows(jnp.asarray(worker_gradient(worker, config.size, seed=0), config.dtype))
        for worker in range(2)
    ]
    norms = operations.by("xla").statistics(rows[0])
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
        _WORKER: ((rows[0], messages), config.size),
    }
    results = []
    for name, (arguments, size) in cases.items():
        operation = all_of_a_worker if name == _WORKER else functools.partial(operation_of, name)
        calls = {
            backend: functools.partial(jax.jit(operation(backend, layout)), *arguments)
            for backend in BACKENDS
        }
        seconds = in_turns(calls, config.repeats)
        ns = {backend: 1e9 * statistics.median(of) / size for backend, of in seconds.items()}
        ratio = median_ratio(seconds["xla"], seconds["native"])
        results.append({"operation": name, **ns, "ratio": ratio})
    return results


def all_of_a_worker(backend: str, layout: Layout) -> Callable[[Array, Array], Array]:
    """Return the operations of one worker in an all-reduce over a ring, by a named backend.

    They are a function of its gradient and of messages of the other workers, one for each chunk of
    the layout, to the decoded sum. The layout has as many chunks as the ring has workers.
    """
    by_backend = operations.by(backend)

    def run(rows: Array, received: Array) -> Array:
        places = place_rows(
            bfloat16_bits(by_backend.statistics(rows)), layout, sort=by_backend.sort
        )
        local = LocalRows(rows, places, jnp.array([1, 2], jnp.uint32))
        sent = [operations.compress(local, 0, 0, layout=layout, implementation=backend)]
        for turn in range(1, layout.num_chunks):
            sent.append(by_backend.hop(received[turn][None], local, turn, turn, layout=layout))
        return by_backend.decompress(jnp.stack(sent), places, layout=layout)

    return run


if __name__ == "__main__":
    run(main, __doc__)
