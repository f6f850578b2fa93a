"""Speed of the codec: nanoseconds per coordinate of every operation, beside what a user would
compare it with.

Two yardsticks are measured in the same run: a copy (what the operation's bytes would cost at memory
  speed), and a plain int8 block quantizer
in jnp, the simplest compressor anybody would write instead.
"""

import dataclasses
import statistics as statistics_module
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common
from pallas_kernels.codec.ordering import order_rows, restore_rows
from pallas_kernels.codec.scales import bfloat16_bits
from pallas_kernels.operations import compress, decompress, hop, statistics


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    # coordinates of the chunk that the operations work on: one that stays in cache, as a bucket of
    # 8 Mi has on 8 workers, and one for which every call pays for fresh pages
    sizes: tuple[int, ...] = (2**20, 16 * 2**20)
    bits: tuple[float, ...] = (
        3.0,
        4.0,
        5.0,
        6.0,
        8.0,
    )  # budgets, beside the paper's preset at 5 bits
    dtype: str = "float32"  # of the gradient: float32 or bfloat16
    repeats: int = 15  # timed calls of each operation; the median counts
    save: bool = True  # write the result to benchmarks/results/codec.json


def operations(
    method: dq.DynamiQ, gradient: Array
) -> dict[str, tuple[Callable[..., Any], tuple, float]]:
    """Name to (function, arguments, bytes per coordinate that it has to move at least)."""
    layout = method.layout(gradient.size, num_chunks=1)
    rows = layout.as_rows(gradient)
    order = order_rows(bfloat16_bits(statistics(rows)[0]), layout)
    seed = jnp.array([1, 2], jnp.uint32)
    payload = jax.jit(lambda *a: compress(*a, layout=layout))(rows, order, 0, 0, seed)
    wire, local = layout.payload_bytes / gradient.size, gradient.dtype.itemsize

    def reorder(norms: Array, rows: Array) -> Array:
        return restore_rows(rows, order_rows(bfloat16_bits(norms), layout))

    return {
        "statistics": (jax.jit(statistics), (rows,), local),
        "reorder": (jax.jit(reorder), (statistics(rows)[0], rows), 2 * local),
        "compress": (
            jax.jit(lambda *a: compress(*a, layout=layout)),
            (rows, order, 0, 0, seed),
            local + wire,
        ),
        "hop": (
            jax.jit(lambda *a: hop(*a, layout=layout)),
            (payload[None], rows, order, 0, 1, seed),
            local + 2 * wire,
        ),
        "decompress": (
            jax.jit(lambda p: decompress(p, order, layout=layout)),
            (payload[None],),
            wire + 4,
        ),
    }


def int8_operations(
    gradient: Array, block: int = 128
) -> dict[str, tuple[Callable[..., Any], tuple, float]]:
    """A plain int8 block quantizer, round to nearest: what one would write in ten lines."""

    def encode(blocks: Array) -> tuple[Array, Array]:
        scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) / 127
        inverse = jnp.where(scale > 0, 1 / scale, 0)
        return jnp.round(blocks * inverse).astype(jnp.int8), scale

    def int8_hop(codes: Array, scale: Array, blocks: Array) -> tuple[Array, Array]:
        return encode(codes.astype(jnp.float32) * scale + blocks)

    blocks = gradient.astype(jnp.float32).reshape(-1, block)
    codes, scale = jax.jit(encode)(blocks)
    wire = 1 + 4 / block
    return {
        "int8 compress": (jax.jit(encode), (blocks,), 4 + wire),
        "int8 hop": (jax.jit(int8_hop), (codes, scale, blocks), 4 + 2 * wire),
    }


def main(config: Config) -> None:
    """Times every operation and prints a table."""
    console = Console()
    results = []
    cases = [(f"{bits:g} bits", dq.DynamiQ(bits=bits)) for bits in config.bits]
    cases.append(("paper, 5 bits", dq.DynamiQ.paper()))
    for size in config.sizes:
        gradient, bandwidth = make_gradient(size, config.dtype), copy_bandwidth(size, config)
        for label, method in track(cases, f"{size} coordinates", console=console, transient=True):
            for name, (function, args, item_bytes) in operations(method, gradient).items():
                results.append(measure(label, name, function, args, size, item_bytes, config))
        for name, (function, args, item_bytes) in int8_operations(gradient).items():
            results.append(measure("plain jnp", name, function, args, size, item_bytes, config))
        for row in results:
            if row["size"] == size:
                row["times_copy"] = row["ns"] * bandwidth / row["bytes"] / 1e9
        table = Table(
            title=f"{size / 2**20:g} Mi {config.dtype} coordinates; "
            f"copy {bandwidth / 1e9:.1f} GB/s (read + written)",
        )
        for heading in ("method", "operation"):
            table.add_column(heading)
        for heading in ("ns / coordinate", "GB/s", "time / time of its bytes at copy speed"):
            table.add_column(heading, justify="right")
        for row in results:
            if row["size"] == size:
                table.add_row(
                    row["method"],
                    row["operation"],
                    f"{row['ns']:.2f}",
                    f"{row['bytes'] / row['ns']:.1f}",
                    f"{row['times_copy']:.1f}",
                )
        console.print(table)
    if config.save:
        console.print(f"Written to {common.save('codec', dataclasses.asdict(config), results)}")


def make_gradient(size: int, dtype: str) -> Array:
    """Normal values whose super-groups differ in norm by factors of 2^2.5, as a model's do."""
    magnitudes = np.repeat(np.exp2(2.5 * np.random.default_rng(0).normal(size=size // 256)), 256)
    normal = jax.random.normal(jax.random.key(0), (size,))
    return (normal * jnp.asarray(magnitudes, jnp.float32)).astype(dtype)


def copy_bandwidth(size: int, config: Config) -> float:
    """Bytes per second, read plus written, of an update in place: memory speed without the price
    of fresh pages, which every operation here pays only for its output.
    """
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    buffer = update(jnp.ones((size,), jnp.float32))
    seconds = []
    for _ in range(config.repeats):
        jax.block_until_ready(buffer)
        start = time.perf_counter()
        buffer = jax.block_until_ready(update(buffer))
        seconds.append(time.perf_counter() - start)
    return 8 * size / statistics_module.median(seconds)


def measure(
    label: str,
    name: str,
    function: Callable[..., Any],
    args: tuple,
    size: int,
    item_bytes: float,
    config: Config,
) -> dict[str, Any]:
    """One row of the table; `item_bytes` is what a coordinate has to move at least."""
    seconds = common.median_seconds(function, *args, repeats=config.repeats)
    ns = seconds / size * 1e9
    return {"method": label, "operation": name, "size": size, "ns": ns, "bytes": item_bytes}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
