"""The part of a block in a message: words of codes, and scales.

Messages are read and written in units of 16 bits, the largest unit that divides every section of a
message. The compiler joins two of them into one access of 32 bits.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._triton.arithmetic import join_low, select_bits
from pallas_kernels._triton.blocks import (
    LANES,
    PIECES,
    U32,
    Block,
    iota,
    merge_bytes,
    merge_halves,
    split_lanes,
)
from pallas_kernels.codec import MAX_WIDTH, Index, Layout
from pallas_kernels.codec.bit_planes import UNIT, transpose


def load_codes(block: Block, message_ref, start: Index, bits: Sequence[int]) -> list[Array]:
    """Load eight `bits` of the codes of every piece: words [rows, 8] of bytes."""
    from jax.experimental.pallas import triton

    def load(bit: int) -> Array:
        units = start + block.plane(bit)
        has_bit = jnp.broadcast_to(block.width > bit, units.shape)
        return merge_halves(triton.load(message_ref.at[units], mask=has_bit, other=0).astype(U32))

    return transpose([load(bit) for bit in bits], select_bits)


def store_codes(block: Block, words: list[Array], bits: Sequence[int], message_ref) -> None:
    """Store the words that `load_codes` loads."""
    for bit, word in zip(bits, transpose(words, select_bits), strict=True):

        @pl.when(block.width > bit)
        def _(bit: int = bit, word: Array = word) -> None:
            message_ref[block.plane(bit)] = split_lanes(word, 2).astype(jnp.uint16)


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
            join_low(first, second, 8)
            for first, second in zip(group_scales[::2], group_scales[1::2], strict=True)
        ]
    else:
        columns = [merge_bytes(values, 2) for values in group_scales]
    if columns[0].shape[1] > 1:
        for piece, units in enumerate(columns):
            at = (groups + count // 2 * piece)[:, None] + iota(count // 2)[None, :]
            message_ref[at] = units.astype(jnp.uint16)
        message_ref[supers] = super_bits.astype(jnp.uint16)
        return
    # One store for all: the columns of a tile, the last of which all hold the super-scale.
    column = iota(2 * len(columns))[None, :]
    units = super_bits[:, None]
    for index, values in enumerate(columns):
        units = jnp.where(column == index, values, units)
    at = jnp.where(column < len(columns), groups[:, None] + column, supers[:, None])
    message_ref[at] = units.astype(jnp.uint16)


def pad(layout: Layout, used: Array, message_ref) -> None:
    """Write the zeros after the planes, which take `used` units, and at the end of a message."""

    def clear(start: Index, stop: int, count: int) -> None:
        # Some zeros are stored twice: a shape has to be a power of two.
        at = lax.min(start + iota(count), jnp.int32(stop - 1))
        message_ref[at] = jnp.zeros((count,), jnp.uint16)

    if layout.padding_start < layout.payload_bytes:
        clear(layout.padding_start // 2, layout.payload_bytes // 2, 8)
    # Units that no step of the allocation could use, fewer than the largest of them.
    half = UNIT // 2
    pl.when(used < layout.units)(lambda: clear(used * half, layout.units * half, MAX_WIDTH * half))
