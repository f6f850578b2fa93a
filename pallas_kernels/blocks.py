"""Blocks of rows for the XLA backend: loops over them, and what the operations do with one."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.rows import decode_rows

# Rows per step on a CPU. A step's float32 values (512 KiB) stay in a core's cache from the decode
# to the code; as one fused pass over a large array XLA:CPU decodes twice and spills every
# intermediate to memory (measured: 3x slower).
_CPU_BLOCK_ROWS = 512

Carry = TypeVar("Carry")


def for_each_block(
    num_rows: int, step: Callable[[Array | int, int, Carry], Carry], carry: Carry
) -> Carry:
    """Calls `carry = step(first, count, carry)` for blocks that cover all rows.

    The last block is moved back to end with the rows, so a step must be a pure function of its
    rows: some are done twice, with the same result.
    """
    count = min(num_rows, _CPU_BLOCK_ROWS) if jax.default_backend() == "cpu" else num_rows
    steps = -(-num_rows // count)
    if steps == 1:
        return step(0, count, carry)

    def body(index: Array, carry: Carry) -> Carry:
        return step(lax.min(index * count, num_rows - count), count, carry)

    return lax.fori_loop(0, steps, body, carry)


def partial_sum(
    payloads: Array, rows: Array, places: Array, *, layout: Layout
) -> Callable[[Array | int, int], Array]:
    """Function `(first, count)` to the float32 rows [count, 256] at places `first .. first + count`
    of the local chunk plus those of the received messages, uint8 [received, bytes].
    """
    messages = jax.vmap(layout.unpack)(payloads)

    def total(first: Array | int, count: int) -> Array:
        def add(message: Array | int, values: Array) -> Array:
            return values + decode_rows_of(messages, message, first, count, layout=layout)

        values = gather(rows, places, first, count)
        # A loop, so that many messages compile as fast as two.
        return (
            add(0, values) if len(payloads) == 1 else lax.fori_loop(0, len(payloads), add, values)
        )

    return total


def gather(rows: Array, places: Array, first: Array | int, count: int) -> Array:
    """Rows at places `first .. first + count` of a chunk, as float32 [count, 256]."""
    indices = lax.dynamic_slice_in_dim(places, first, count)
    return rows.at[indices].get(mode="promise_in_bounds", unique_indices=True).astype(jnp.float32)


def decode_rows_of(
    messages: tuple[Array, Array, Array],
    message: Array | int,
    first: Array | int,
    count: int,
    *,
    layout: Layout,
) -> Array:
    """Rows at places `first .. first + count` of one of several unpacked messages, whose parts are
    stacked on a leading axis: float32 [count, 256].
    """
    start = message * layout.rows_per_chunk + first
    codes, group_bytes, super_bits = (
        lax.dynamic_slice_in_dim(part.reshape(-1, *part.shape[2:]), start, count)
        for part in messages
    )
    levels = layout.levels(first, count)
    return decode_rows(codes, group_bytes, super_bits, levels, group_size=layout.group_size)
