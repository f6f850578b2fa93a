"""Speed of the codec: nanoseconds per coordinate of every operation, beside what a user would
compare it with.

    python -m benchmarks.speed.codec

Two yardsticks are measured in the same run: a copy, for the time of the operation's bytes at memory
speed, and a plain int8 block quantizer in jnp, the simplest compressor anybody would write instead.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich.progress import track

import dynamiq_jax as dq
from benchmarks.error.plain_codecs import PLAIN_CODECS
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.timing import median_seconds, timed
from dynamiq_jax._measurement.gradients import worker_gradient
from pallas_kernels import operations
from pallas_kernels.codec import LocalRows, Places, place_rows, restore_rows
from pallas_kernels.codec.scales import bfloat16_bits


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    # coordinates of the chunk that the operations work on: one that stays in cache, as a bucket of
    # 8 Mi has on 8 workers, and one for which every call pays for fresh pages
    sizes: tuple[int, ...] = (2**20, 16 * 2**20)
    bits: tuple[float, ...] = (3.0, 4.0, 5.0, 6.0, 8.0)  # budgets, beside the paper's preset at 5
    dtype: str = "float32"  # of the gradient: float32 or bfloat16
    repeats: int = 15  # timed calls of each operation; the median counts
    save: bool = True  # write the result to benchmarks/results/codec.json


COLUMNS = (
    Column("method", "method"),
    Column("operation", "operation"),
    Column("ns / coordinate", "ns", "{:.2f}"),
    Column("GB/s", lambda row: row["bytes"] / row["ns"], "{:.1f}"),
    Column("time / time of its bytes at copy speed", "times_copy", "{:.1f}"),
)


def kernel_operations(
    method: dq.DynamiQ, gradient: Array
) -> dict[str, tuple[Callable[..., Any], tuple, float]]:
    """Return name to (function, arguments, bytes per coordinate that it has to move at least)."""
    layout = method.layout(gradient.size, num_chunks=1)
    rows = layout.as_rows(gradient)
    norms = operations.by().statistics(rows)
    places = place_rows(bfloat16_bits(norms), layout)
    local = LocalRows(rows, places, jnp.array([1, 2], jnp.uint32))
    compress = jax.jit(functools.partial(operations.compress, layout=layout))
    payload = compress(local, 0, 0)
    wire, item_bytes = layout.payload_bytes / gradient.size, gradient.dtype.itemsize

    def reorder(norms: Array, rows: Array) -> tuple[Array, Places]:
        places = place_rows(bfloat16_bits(norms), layout, sort=operations.by().sort)
        return restore_rows(rows, places.order), places

    return {
        "statistics": (jax.jit(operations.by().statistics), (rows,), item_bytes),
        "reorder": (jax.jit(reorder), (norms, rows), 2 * item_bytes),
        "compress": (compress, (local, 0, 0), item_bytes + wire),
        "hop": (
            jax.jit(functools.partial(operations.by().hop, layout=layout)),
            (payload[None], local, 0, 1),
            item_bytes + 2 * wire,
        ),
        "decompress": (
            jax.jit(functools.partial(operations.by().decompress, layout=layout)),
            (payload[None], places),
            wire + 4,
        ),
    }


def int8_operations(gradient: Array) -> dict[str, tuple[Callable[..., Any], tuple, float]]:
    """Return the same for a plain int8 block quantizer."""
    codec = PLAIN_CODECS["int8"]
    blocks, encode = codec.blocks(gradient), jax.jit(codec.encode)
    wire = codec.wire_bytes
    return {
        "int8 compress": (encode, (blocks,), 4 + wire),
        "int8 hop": (jax.jit(codec.hop), (*encode(blocks), blocks), 4 + 2 * wire),
    }


@benchmark("codec")
def main(config: Config) -> Report:
    """Time every operation."""
    results: list[dict[str, Any]] = []
    shown = []
    cases = [(f"{bits:g} bits", dq.DynamiQ(bits=bits)) for bits in config.bits]
    cases.append(("paper, 5 bits", dq.DynamiQ.paper()))
    for size in config.sizes:
        gradient = jnp.asarray(worker_gradient(0, size, seed=0)).astype(config.dtype)
        bandwidth = copy_bandwidth(size, config)
        rows = []
        for label, method in track(cases, f"{size} coordinates", transient=True):
            for name, (function, args, item_bytes) in kernel_operations(method, gradient).items():
                rows.append(measure(label, name, function, args, size, item_bytes, config))
        for name, (function, args, item_bytes) in int8_operations(gradient).items():
            rows.append(measure("plain jnp", name, function, args, size, item_bytes, config))
        for row in rows:
            row["times_copy"] = row["ns"] * bandwidth / row["bytes"] / 1e9
        title = (
            f"{size / 2**20:g} Mi {config.dtype} coordinates; "
            f"copy {bandwidth / 1e9:.1f} GB/s (read + written)"
        )
        shown.append(table(title, COLUMNS, rows))
        results += rows
    return Report(results=results, shown=shown)


def copy_bandwidth(size: int, config: Config) -> float:
    """Return the bytes per second, read plus written, of an update in place: memory speed without
    the price of fresh pages, which every operation here pays only for its output.
    """
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = update(jnp.ones((size,), jnp.float32))
    seconds = []
    jax.block_until_ready(buffer)
    for _ in range(config.repeats):
        buffer, of_call = timed(functools.partial(update, buffer))
        seconds.append(of_call)
    return 8 * size / statistics.median(seconds)


def measure(
    label: str,
    name: str,
    function: Callable[..., Any],
    args: tuple,
    size: int,
    item_bytes: float,
    config: Config,
) -> dict[str, Any]:
    """Time an operation that has to move `item_bytes` of a coordinate: a row of the table."""
    seconds = median_seconds(function, *args, repeats=config.repeats)
    ns = seconds / size * 1e9
    return {"method": label, "operation": name, "size": size, "ns": ns, "bytes": item_bytes}


if __name__ == "__main__":
    run(main, __doc__)
