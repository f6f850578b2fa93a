"""The part of a block in a message: planes of codes, and scales.

Messages are in units of 16 bits, the largest that divides every section, and mostly accessed in
words of two. A byte of a plane has one bit for each of the eight pieces of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._mosaic_gpu.blocks import Block
from pallas_kernels._mosaic_gpu.launch import PIECES, U32, cast, load, store
from pallas_kernels.codec import MAX_WIDTH, Index
from pallas_kernels.codec.bit_planes import UNIT


class Received(NamedTuple):
    """Part of a block in a message."""

    planes: list[Array]  # uint16, words in units of 16 bits
    group_bytes: list[Array]  # of every piece, uint32
    super_bits: Array  # uint32 [rows]


def receive(block: Block, message_ref) -> Received:
    """Load the block's part of a message."""
    # The first unit stands for planes that no row of the block has.
    units = [jnp.where(bit < block.widest, unit, 0) for bit, unit in enumerate(block.units)]
    super_bits = block.cast(load(_super_scales(block, message_ref), (block.rows,)), (0,))
    return Received(
        [_load_plane(block, message_ref, unit) for unit in units],
        _load_group_bytes(block, message_ref),
        super_bits.astype(U32),
    )


def store_planes(block: Block, planes: Sequence[Array], message_ref) -> None:
    """Store the rows that have a plane, for all planes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parts = [block.split(words, 2).astype(jnp.uint16) for words in planes]
    uniform = block.widest == block.narrowest

    @pl.when(uniform)
    def _() -> None:
        for bit, values in enumerate(parts):

            @pl.when(bit < block.widest)
            def _(bit: int = bit, values: Array = values) -> None:
                _store_units(message_ref, block.units[bit], values)

    @pl.when(~uniform)
    def _() -> None:  # row by row: behind those that have a plane, other programs write
        for bit, values in enumerate(parts):
            store(block.planes.at[bit], values.shape, values)
        plgpu.commit_smem()

        def store_plane(bit: Array, _: None) -> None:
            unit = block.places.starts[block.chunk, bit] + block.first

            def store_row(row: Array, _: None) -> None:
                values = load(block.planes.at[bit, row], block.halves[1:])
                values = cast(values, block.halves, block.lanes[1:])
                _store_units(message_ref, unit + row, values)

            rows = lax.min(block.plane_rows(bit) - block.first, jnp.int32(block.rows))
            lax.fori_loop(0, rows, store_row, None)

        lax.fori_loop(0, block.widest, store_plane, None)


def store_scales(
    block: Block, group_bytes: Sequence[Array], super_bits: Array, message_ref
) -> None:
    """Store the group scales of all pieces, and the super-scales; both are uint32."""
    groups, ref = block.layout.groups // PIECES, _group_scales(block, message_ref)
    if groups > 1:
        shifts = block.count(block.groups, 1) * np.uint32(8)
        sums = [jnp.sum(values << shifts, axis=1, dtype=U32) for values in group_bytes]
        group_bytes = [block.cast(values, (0,)) for values in sums]
    for index, first in enumerate(range(0, PIECES, 4 // groups)):
        word = group_bytes[first]
        for byte in range(groups, 4, groups):
            word = word | (group_bytes[first + byte // groups] << np.uint32(8 * byte))
        _store_word(block, ref, index, word)
    ref = _super_scales(block, message_ref)
    if block.rows > 1:
        store(ref, (block.rows,), super_bits.astype(jnp.uint16))
    else:  # JAX takes it for a scalar, which it cannot store; the zeros behind it go along
        ref = _part(message_ref, block.layout.super_scales_start // 2, (2,))
        _store_word(block, ref, 0, super_bits)


def clear(block: Block, message_ref) -> None:
    """Write zeros after the planes, where rows need fewer units, and at the end."""
    layout = block.layout

    @pl.when(lax.axis_index("block") == 0)
    def _() -> None:
        for half in range(layout.padding_start // 2, layout.payload_bytes // 2):
            message_ref[half] = jnp.uint16(0)
        zeros = cast(jnp.zeros(block.halves[1:], jnp.uint16), block.halves, block.lanes[1:])

        def clear_unit(unit: Array, _: None) -> None:
            _store_units(message_ref, unit, zeros)

        # Fewer than the largest step of the allocation.
        used = block.places.starts[block.chunk, MAX_WIDTH]
        lax.fori_loop(used, layout.units, clear_unit, None)


def _load_group_bytes(block: Block, message_ref) -> list[Array]:
    groups, ref = block.layout.groups // PIECES, _group_scales(block, message_ref)
    words = [_load_word(block, ref, index) for index in range(block.layout.groups // 4)]
    result = []
    for byte in range(0, block.layout.groups, groups):
        word = words[byte // 4] >> np.uint32(8 * (byte % 4))
        word = block.spread(word, (0,), rank=len(block.groups))
        if groups > 1:
            word = word >> block.count(block.groups, 1) * np.uint32(8)
        result.append(word & np.uint32(0xFF))
    return result


def _load_plane(block: Block, message_ref, unit: Array) -> Array:
    values = load(_part(message_ref, unit * (UNIT // 2), block.halves), block.halves)
    return cast(values, block.halves, block.lanes)


def _store_units(message_ref, unit: Array, values: Array) -> None:
    store(_part(message_ref, unit * (UNIT // 2), values.shape), values.shape, values)


def _group_scales(block: Block, message_ref) -> Any:
    start = block.layout.group_scales_start + block.first * block.layout.groups
    return _part(message_ref, start // 2, (block.rows, block.layout.groups // 2))


def _super_scales(block: Block, message_ref) -> Any:
    return _part(message_ref, block.layout.super_scales_start // 2 + block.first, (block.rows,))


def _load_word(block: Block, ref, index: int) -> Array:
    """Load one word of every row, uint32, of an array of halves."""
    halves = load(ref, (block.rows, ref.size // block.rows // 2, 2), index)
    return block.merge(cast(halves, block.halves, (0, block.lanes[-1])), (0,))


def _store_word(block: Block, ref, index: int, words: Array) -> None:
    """Store what `_load_word` loads."""
    halves = block.split(words, 2, (0,)).astype(jnp.uint16)
    store(ref, (block.rows, ref.size // block.rows // 2, 2), halves, index)


def _part(message_ref, start: Index, shape: tuple[int, ...]) -> Any:
    return message_ref.at[pl.ds(start, int(np.prod(shape)))]
