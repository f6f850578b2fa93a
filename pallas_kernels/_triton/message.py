"""The part of a block in a message: words of codes, and scales.

Messages are read and written in units of 16 bits, the largest unit that divides every section of a
message. The compiler joins two of them into one access of 32 bits.
"""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._triton.blocks import (
    LANES,
    PIECES,
    U32,
    Block,
    in_every_byte,
    iota,
    merge_lanes,
    split_lanes,
)
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.packing import planes


def halves(payloads: Array) -> Array:
    """View messages, uint8 [..., bytes], in 16-bit units."""
    return lax.bitcast_convert_type(payloads.reshape(-1, 2), jnp.uint16)


def as_bytes(message: Array) -> Array:
    """Invert `halves`, for one message."""
    return lax.bitcast_convert_type(message, jnp.uint8).reshape(-1)


def unpack(block: Block, message_ref, start: Index) -> tuple[list[Array], list[Array]]:
    """Load words [rows, 8] of the low bytes of codes and, for widths over 8, of the high ones."""

    def load(low: Index, bits: int, part: int) -> Array:
        units = message_ref[start + block.plane(low, bits, part)].astype(U32)
        return merge_lanes(units, 2)

    zero = [jnp.zeros((block.row.shape[0], 8), U32) for _ in range(PIECES)]
    whole, rest = block.width >> 3, block.width & 7  # planes of 8 bits; the other bits
    words = zero
    for bits in (4, 2, 1):
        low = rest & (8 - 2 * bits)  # bits of the larger planes before it

        def add(words: list, bits: int = bits, low: Array = low) -> list:
            for part in range(bits):
                word = load(8 * whole + low, bits, part)
                for lane in range(8 // bits):
                    field = (word >> np.uint32(bits * lane)) & in_every_byte(2**bits - 1)
                    piece = part + bits * lane
                    words[piece] = words[piece] | (field << low.astype(U32))
            return words

        words = block.when(bits, lambda words, add=add: add(list(words)), list, words)
    if max(block.widths) < 8:
        return words, []

    def bytes_at(low: int) -> Callable:
        return lambda _: [load(low, 8, part) for part in range(PIECES)]

    first = lax.cond(whole >= 1, bytes_at(0), list, words)
    if max(block.widths) == 8:
        return first, []
    high = lax.cond(whole >= 1, list, lambda _: list(zero), words)
    if 16 in block.widths:
        high = lax.cond(whole >= 2, bytes_at(8), list, high)
    return first, high


def pack(block: Block, low: list[Array], high: list[Array], message_ref) -> None:
    """Store the words that `unpack` loads."""

    def store(at: Index, bits: int, part: int, word: Array) -> None:
        message_ref[block.plane(at, bits, part)] = split_lanes(word, 2).astype(jnp.uint16)

    whole, rest = block.width >> 3, block.width & 7
    words = [jnp.where(whole >= 1, h, w) for w, h in zip(low, high, strict=True)] if high else low
    for bits in (4, 2, 1):
        if not any(bits in planes(width) for width in block.widths):
            continue
        at = rest & (8 - 2 * bits)

        @pl.when((rest & bits) != 0)
        def _(bits: int = bits, at: Array = at) -> None:
            for part in range(bits):
                fields = [
                    ((words[part + bits * lane] >> at.astype(U32)) & in_every_byte(2**bits - 1))
                    << np.uint32(bits * lane)
                    for lane in range(8 // bits)
                ]
                store(8 * whole + at, bits, part, functools.reduce(operator.or_, fields))

    for index, wide in enumerate((low, high)):
        if any(width >= 8 * (index + 1) for width in block.widths):

            @pl.when(whole >= index + 1)
            def _(index: int = index, wide: list[Array] = wide) -> None:
                for part in range(PIECES):
                    store(8 * index, 8, part, wide[part])


def load_group_bytes(block: Block, message_ref, start: Index, piece: int) -> Array:
    """Load the group scales of a piece: uint32 [rows, 32 / group_size] below 256."""
    count = LANES // block.layout.group_size
    base = start + block.layout.group_scales_start // 2 + block.place * (count * PIECES // 2)
    if count == 1:
        unit = message_ref[base + piece // 2].astype(U32)
        return ((unit >> np.uint32(8 * (piece % 2))) & np.uint32(0xFF))[:, None]
    units = message_ref[(base + count // 2 * piece)[:, None] + iota(count // 2)[None, :]]
    return split_lanes(units.astype(U32), 2, bits=8) & np.uint32(0xFF)


def store_scales(block: Block, group_scales: list[Array], super_bits: Array, message_ref) -> None:
    """Store group scales, uint32 [rows, 32 / group_size] of every piece, and super-scales."""
    count = LANES // block.layout.group_size
    groups = block.layout.group_scales_start // 2 + block.place * (count * PIECES // 2)
    supers = block.layout.super_scales_start // 2 + block.place
    if count == 1:
        columns = [
            first | (second << np.uint32(8))
            for first, second in zip(group_scales[::2], group_scales[1::2], strict=True)
        ]
    else:
        columns = [merge_lanes(values, 2, bits=8) for values in group_scales]
    if columns[0].shape[1] > 1:
        for piece, units in enumerate(columns):
            at = (groups + count // 2 * piece)[:, None] + iota(count // 2)[None, :]
            message_ref[at] = units.astype(jnp.uint16)
        message_ref[supers] = super_bits.astype(jnp.uint16)
        return
    # One store for all: the columns of a tile, the last of which all hold the super-scale.
    column = iota(2 * len(columns))[None, :]
    units, at = super_bits[:, None], supers[:, None]
    for index, values in enumerate(columns):
        units = jnp.where(column == index, values, units)
        at = jnp.where(column == index, (groups + index)[:, None], at)
    message_ref[at] = units.astype(jnp.uint16)


def pad(layout: Layout, message_ref) -> None:
    """Write the zeros at the end of a message."""
    if layout.padding_start < layout.payload_bytes:

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            # Some zeros are stored twice: a shape has to be a power of two.
            last = jnp.int32(layout.payload_bytes // 2 - 1)
            at = lax.min(layout.padding_start // 2 + iota(8), last)
            message_ref[at] = jnp.zeros((8,), jnp.uint16)
