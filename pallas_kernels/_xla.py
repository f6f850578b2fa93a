"""Pure JAX backend: available everywhere, and the reference that kernels reproduce.

Where a CPU and an accelerator compile different programs well, `platform_dependent` chooses one of
two, here and in the codec. Both give the same bytes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.compat import override
from pallas_kernels._jax.dependencies import zeros_after
from pallas_kernels._jax.platforms import platform_dependent
from pallas_kernels.backend import Backend
from pallas_kernels.codec import (
    SUPER_GROUP_SIZE,
    Index,
    Layout,
    LocalRows,
    Places,
    bit_planes,
    l2_norm,
    offsets,
)
from pallas_kernels.codec.rows import decode_rows, encode_rows
from pallas_kernels.row_blocks import block_rows, for_each_block

# Sums of 256 squares in this range are as precise as those of scaled values: nothing overflows, and
# what underflows is too small to count.
_USUAL = (2.0**-40, 2.0**120)

_RowsAt = Callable[[Index, int], Array]  # (first place, count) to float32 [count, 256]
_Sections = tuple[Array, Array, Array]  # planes, group scales, super-scales


@jax.jit
def statistics(rows: Array) -> Array:
    """Compute the norm of every row."""

    def step(first: Index, count: int, norms: Array) -> Array:
        block = lax.dynamic_slice_in_dim(rows, first, count).astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(norms, _norms(block), first, axis=0)

    return for_each_block(rows.shape[0], step, zeros_after(rows, rows.shape[:1], jnp.float32))


@functools.partial(jax.jit, static_argnames="layout")
def hop(payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout) -> Array:
    """Encode the sum of received messages and local rows."""
    places = local.places.at(chunk)
    values = _partial_sum(payloads, local.rows, places, layout)
    # Rows of a bucket, a 256th of its coordinates: the number of none wraps, so no noise repeats.
    first_id = jnp.asarray(chunk).astype(jnp.uint32) * jnp.uint32(layout.rows_per_chunk)

    def step(first: Index, count: int, parts: _Sections) -> _Sections:
        planes, *written = parts
        ids = first_id + jnp.asarray(first).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
        widths = lax.dynamic_slice_in_dim(places.widths, first, count)
        codes, *scales = encode_rows(
            values(first, count),
            offsets(ids, turn, local.seed, layout.quantizer.rounding),
            layout.quantizer.levels_of_rows(widths),
            group_size=layout.group_size,
        )
        group_bytes, super_bits = (
            lax.dynamic_update_slice_in_dim(part, block, first, axis=0)
            for part, block in zip(written, scales, strict=True)
        )
        planes = bit_planes.pack(planes, codes, widths, places.starts, first)
        return planes, group_bytes, super_bits

    rows = layout.rows_per_chunk
    given = payloads if len(payloads) else local.rows
    empty = (
        zeros_after(given, (layout.units + block_rows(rows), bit_planes.UNIT), jnp.uint8),
        zeros_after(given, (rows, layout.groups), jnp.uint8),
        zeros_after(given, (rows,), jnp.uint16),
    )
    planes, *scales = for_each_block(rows, step, empty)
    return layout.message(planes[: layout.units], *scales)


@functools.partial(jax.jit, static_argnames="layout")
def decompress_accumulate(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> Array:
    """Sum received messages and local rows."""
    places = local.places.at(chunk)
    values = _partial_sum(payloads, local.rows, places, layout)

    def step(first: Index, count: int, sums: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(sums, values(first, count), first, axis=0)

    empty = zeros_after(payloads, (layout.rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32)
    return for_each_block(layout.rows_per_chunk, step, empty)


@functools.partial(jax.jit, static_argnames="layout")
def decompress(payloads: Array, places: Places, *, layout: Layout) -> Array:
    """Decode the messages of all chunks to rows in their original order."""
    num_chunks, rows_per_chunk = places.order.shape
    flat = payloads.reshape(-1)  # XLA:TPU pads the axis of a single message

    def chunk_step(chunk: Array, decoded: Array) -> Array:
        of_chunk = places.at(chunk)
        # An int32 would wrap behind 2 GiB of messages.
        start = jnp.asarray(chunk).astype(jnp.uint32) * np.uint32(layout.payload_bytes)
        message = _sections(lax.dynamic_slice_in_dim(flat, start, layout.payload_bytes), layout)

        def step(first: Index, count: int, decoded: Array) -> Array:
            rows = lax.dynamic_slice_in_dim(of_chunk.order, first, count)
            values = _decode(message, 0, of_chunk, first, count, layout)
            # Straight to their places: a second array of this size would cost as much again.
            return decoded.at[rows].set(values, unique_indices=True, mode="promise_in_bounds")

        return for_each_block(rows_per_chunk, step, decoded)

    empty = zeros_after(payloads, (num_chunks * rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32)
    return lax.fori_loop(0, num_chunks, chunk_step, empty)


class Xla(Backend):
    """The base."""

    name = "xla"
    platform = "default"  # every platform for which no other backend is chosen

    statistics = staticmethod(statistics)
    hop = staticmethod(hop)
    decompress_accumulate = staticmethod(decompress_accumulate)
    decompress = staticmethod(decompress)

    @override
    def why_not_here(self) -> None:
        return None

    @override
    def needs_check(self) -> bool:
        return False


def _partial_sum(payloads: Array, rows: Array, places: Places, layout: Layout) -> _RowsAt:
    """Return a function that computes rows of a chunk, at its places: local and received ones."""
    received = len(payloads)
    messages = _sections(payloads[0] if received == 1 else payloads, layout)

    def total(first: Index, count: int) -> Array:
        def add(message: Index, values: Array) -> Array:
            return values + _decode(messages, message, places, first, count, layout)

        indices = lax.dynamic_slice_in_dim(places.order, first, count)
        local = rows.at[indices].get(mode="promise_in_bounds", unique_indices=True)
        values = local.astype(jnp.float32)
        if received <= 1:
            return add(0, values) if received else values
        # A loop, so that many messages compile as fast as two.
        return lax.fori_loop(0, received, add, values)

    return total


def _sections(payloads: Array, layout: Layout) -> _Sections:
    """Read the sections of messages, uint8 [..., bytes], each section of all messages at once."""
    room = block_rows(layout.rows_per_chunk)  # a block may read behind the last of the planes
    planes = layout.planes(payloads).reshape(-1, bit_planes.UNIT)
    group_bytes, super_bits = layout.scales(payloads)
    return (
        jnp.pad(planes, ((0, room), (0, 0))),
        group_bytes.reshape(-1, layout.groups),
        super_bits.reshape(-1),
    )


def _decode(
    messages: _Sections, message: Index, places: Places, first: Index, count: int, layout: Layout
) -> Array:
    """Decode `count` rows of one of several messages of a chunk: float32 [count, 256]."""
    planes, *scales = messages
    widths = lax.dynamic_slice_in_dim(places.widths, first, count)
    codes = bit_planes.unpack(planes, widths, places.starts + message * layout.units, first)
    row = message * layout.rows_per_chunk + first
    group_bytes, super_bits = (lax.dynamic_slice_in_dim(part, row, count) for part in scales)
    return decode_rows(
        codes.reshape(count, SUPER_GROUP_SIZE),
        group_bytes,
        super_bits,
        layout.quantizer.levels_of_rows(widths),
        group_size=layout.group_size,
    )


def _norms(block: Array) -> Array:
    """Compute L2 norms of rows."""
    norms = functools.partial(l2_norm, axis=1)

    def usual_norms(block: Array) -> Array:
        # Unscaled squares suffice for usual values and take a third of the time on a CPU.
        squares = jnp.sum(block * block, axis=1)
        usual = (squares > _USUAL[0]) & (squares < _USUAL[1])
        return lax.cond(jnp.all(usual), lambda: jnp.sqrt(squares), lambda: norms(block))

    return platform_dependent({"cpu": usual_norms, "default": norms}, block)
