"""The kernels of an all-reduce, each compiled for a TPU on its own."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import dynamiq_jax as dq
from benchmarks.aot import tpu_programs as tpu
from benchmarks.aot.tpu_schedule import read_schedule
from pallas_kernels import operations
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, LocalRows, Places

_PLACES = 128  # of a step
_BLOCKS_OF_STATISTICS = 8  # of a step
_CHUNKS_OF_SOLVER = 8  # of a step


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operation on given shapes."""

    name: str  # of the kernel
    function: Callable[..., Any]
    arguments: list[jax.ShapeDtypeStruct]
    coordinates: int  # that one call handles
    steps: int
    chunks: int = 1  # before each of which a message is copied
    messages: int = 0  # in a loop of every step


def kernels(size: int, num_chunks: int, dtype: str) -> dict[str, Kernel]:
    """Return the kernels of an all-reduce of 5 bits in chunks, by what they are for.

    Widths are 2 to 8, as nearly all blocks have. There is other code for wider blocks.
    """
    layout = dq.DynamiQ(bits=5.0, widths=tuple(range(2, 9))).layout(size, num_chunks)
    rows, blocks = layout.rows_per_chunk, -(-layout.rows_per_chunk // _PLACES)
    shape = jax.ShapeDtypeStruct
    flat = shape((size,), dtype)
    table = shape((num_chunks, rows), "int32")
    places = [table, table, shape((num_chunks, 17), "int32")]
    message = shape((layout.payload_bytes // 4,), "uint32")
    local = [flat, *places, shape((2,), "uint32"), shape((), "int32")]
    of_chunk = functools.partial(Kernel, coordinates=rows * SUPER_GROUP_SIZE, steps=blocks)
    messages = shape((num_chunks * layout.payload_bytes // 4,), "uint32")
    of_messages = functools.partial(
        Kernel,
        coordinates=layout.num_rows * SUPER_GROUP_SIZE,
        steps=blocks * num_chunks,
        chunks=num_chunks,
    )
    run = operations.by("mosaic_tpu")

    def hop(messages: int, *args: Any) -> jax.Array:
        received = jnp.stack(args[:messages])
        return run.hop(received, *_local(layout, *args[messages:]), layout=layout)

    def compress(*args: Any) -> jax.Array:
        return operations.compress(
            *_local(layout, *args), layout=layout, implementation="mosaic_tpu"
        )

    def scaled_sums(*args: Any) -> tuple[jax.Array, jax.Array]:
        local, chunk, _ = _local(layout, *args[num_chunks - 1 :])
        received = jnp.stack(args[: num_chunks - 1])
        return run.scaled_sums(received, local, chunk, layout=layout)

    def energies(flat: jax.Array) -> jax.Array:
        return run.energies(flat.reshape(num_chunks, -1), layout=layout)

    def decompress(flat: jax.Array, *args: Any) -> jax.Array:
        received = flat.reshape(num_chunks, -1)
        return run.decompress(received, Places(*args), layout=layout).reshape(-1)

    def decompress_sums(flat: jax.Array, *args: Any) -> jax.Array:
        received, (*places, order) = flat.reshape(num_chunks, -1), args
        rows = run.decompress_sums(received, Places(*places), order, layout=layout)
        return rows.reshape(-1)

    def statistics(flat: jax.Array) -> jax.Array:
        return run.statistics(layout.as_rows(flat))

    def solve(energies: jax.Array) -> jax.Array:
        return run.solve(energies, layout=layout)

    others = num_chunks - 1
    return {
        "hop": of_chunk("hop", functools.partial(hop, 1), [message, *local]),
        "first hop": of_chunk("compress", compress, local),
        "sum of an all-to-all": of_chunk(
            "scaled_sums", scaled_sums, [message] * others + local, messages=others
        ),
        "energies of an all-to-all": of_messages("energies", energies, [messages]),
        "decompress": of_messages("decompress", decompress, [messages, *places]),
        "decompress of an all-to-all": of_messages(
            "decompress_sums", decompress_sums, [messages, *places, table]
        ),
        "statistics": Kernel(
            "statistics",
            statistics,
            [flat],
            layout.num_rows * SUPER_GROUP_SIZE,
            -(-layout.num_rows // (_PLACES * _BLOCKS_OF_STATISTICS)),
        ),
        "widths": Kernel(
            "solve",
            solve,
            [table],
            layout.num_rows * SUPER_GROUP_SIZE,
            -(-num_chunks // _CHUNKS_OF_SOLVER),
        ),
    }


def examine(kernel: Kernel, device: Mesh, schedules: Path) -> dict[str, Any]:
    """Compile a kernel and read its schedule."""
    arguments = [(argument, PartitionSpec()) for argument in kernel.arguments]
    program = tpu.compile_for(device, kernel.function, arguments, PartitionSpec())
    schedule = read_schedule(schedules, kernel.name)
    cycles = schedule.cycles(kernel.steps, rare=kernel.chunks, loops_of_step=kernel.messages)
    memory = re.findall(r'"used_scoped_memory_configs":\[\{[^]]*"size":"(\d+)"', program.text)
    return {
        "compile_cpu_seconds": round(program.compile_cpu_seconds, 2),
        "bundles": schedule.program.all,
        "bundles_of_step": schedule.of_step,
        "cycles": cycles,
        "cycles_per_coordinate": round(cycles / kernel.coordinates, 4),
        "vector_memory_bytes": max(map(int, memory), default=0),
    }


def _local(layout: Layout, flat, order, widths, starts, seed, chunk):
    local = LocalRows(layout.as_rows(flat), Places(order, widths, starts), seed)
    return local, chunk, chunk
