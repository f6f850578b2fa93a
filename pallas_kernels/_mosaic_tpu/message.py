"""The part of a block in a message: planes of codes, and scales.

A plane of a block is one register: a sublane is a word of the 8 of a row. Scales are read and
written like planes, 1,024 words at a time, of which they are the first; a gather along the lanes
brings them to the lanes of their places.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels._mosaic_tpu import words
from pallas_kernels._mosaic_tpu.blocks import Block
from pallas_kernels._mosaic_tpu.vectors import (
    EIGHTHS,
    LANES,
    PLACES,
    QUARTERS,
    SUBLANES,
    U32,
    VECTOR,
    iota,
    lane_of_places,
    places_of_lanes,
    sublane,
    swap,
    take_lanes,
)
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.layout import Layout

_UNIT = UNIT // 4  # words
_PLANES_OF_BRANCH = 4
_BYTE = np.uint32(0xFF)
_HALF = np.uint32(0xFFFF)


def load_planes(block: Block, message_ref, planes_ref) -> None:
    """Load the planes that the block has to `planes_ref`, uint32 [8 or 16, 8, 128]."""

    def load(bit: int) -> None:
        planes_ref[bit] = swap(words.load(message_ref, _first_word(block, bit)))

    _for_planes(block, planes_ref.shape[0], load)


def merge_planes(block: Block, planes_ref, message_ref) -> None:
    """Store the planes that the block has, which are zeros in lanes that lack one."""

    def merge(bit: int) -> None:
        words.merge(message_ref, _first_word(block, bit), swap(planes_ref[bit]))

    _for_planes(block, planes_ref.shape[0], merge)


def _for_planes(block: Block, bits: int, step: Callable[[int], None]) -> None:
    """Run a step for all planes that the block has, and some that it lacks.

    A branch for a few of them: each is a boundary that the compiler does not move code across.
    """
    for low in reversed(range(0, bits, _PLANES_OF_BRANCH)):

        def steps(low: int = low) -> None:
            for bit in range(low, low + _PLANES_OF_BRANCH):
                step(bit)

        steps() if low == 0 else pl.when(block.has_wider(low))(steps)


def _first_word(block: Block, bit: int) -> Array:
    return _UNIT * (block.starts[bit] + block.first)


def load_scales(block: Block, message_ref) -> tuple[list[Array], Array]:
    """Load the group scales of every eighth of the rows, and the super-scales.

    Returns:
      Whole numbers, uint32 [8, 128] each, repeated in the sublanes of a group, and bits of
      bfloat16, uint32 [8, 128].
    """
    groups = _load_groups(block, message_ref)
    return groups, _load_supers(block, message_ref)


def merge_scales(block: Block, groups: Sequence[Array], super_bits: Array, message_ref) -> None:
    """Store what `load_scales` loads."""
    _merge_groups(block, groups, message_ref)
    _merge_supers(block, super_bits, message_ref)


def _load_groups(block: Block, message_ref) -> list[Array]:
    count = _words_of_groups(block.layout)
    loaded = words.load(message_ref, _first_group_word(block))
    # Word w of a place is at sublane w of its lane.
    at = places_of_lanes() * count + (iota(0) & (count - 1))
    row, lane = at >> 7, at & (LANES - 1)
    of_lanes = jnp.zeros(VECTOR, U32)
    for index in range(count):
        found = take_lanes(sublane(loaded, index), lane)
        of_lanes = jnp.where(row == index, found, of_lanes)
    eighths = [sublane(of_lanes, eighth * count // EIGHTHS) for eighth in range(EIGHTHS)]
    shifts = _shifts_of_groups(block.layout)
    return [(word >> shift) & _BYTE for word, shift in zip(eighths, shifts, strict=True)]


def _merge_groups(block: Block, groups: Sequence[Array], message_ref) -> None:
    count = _words_of_groups(block.layout)
    shifted = [
        group << shift for group, shift in zip(groups, _shifts_of_groups(block.layout), strict=True)
    ]
    at = iota(0) * LANES + iota(1)  # of a word among those of the block
    place, word = at >> (count.bit_length() - 1), at & (count - 1)
    lane = lane_of_places(place & (PLACES - 1))
    result = jnp.zeros(VECTOR, U32)
    for index in range(count):
        of_word = shifted[index * EIGHTHS // count : (index + 1) * EIGHTHS // count]
        joined = _or_over_groups(of_word, block.layout)
        result = jnp.where(word == index, take_lanes(joined, lane), result)
    result = jnp.where(place < _used_places(block.layout), result, np.uint32(0))
    words.merge(message_ref, _first_group_word(block), result)


def _or_over_groups(parts: Sequence[Array], layout: Layout) -> Array:
    """Join bytes of words, which are repeated in the sublanes of their groups, in all sublanes."""
    joined = parts[0]
    for part in parts[1:]:
        joined = joined | part
    sublanes_of_group = layout.group_size // QUARTERS
    if sublanes_of_group == SUBLANES:
        return joined
    # The groups of an eighth hold different bytes: bring each to all sublanes.
    result = sublane(joined, 0)
    for first in range(sublanes_of_group, SUBLANES, sublanes_of_group):
        result = result | sublane(joined, first)
    return result


def _load_supers(block: Block, message_ref) -> Array:
    first, odd = _first_super_word(block)
    loaded = sublane(words.load(message_ref, first), 0)
    half = places_of_lanes() + odd
    word = take_lanes(loaded, half >> 1)
    return (word >> ((half & 1) << 4).astype(U32)) & _HALF


def _merge_supers(block: Block, super_bits: Array, message_ref) -> None:
    first, odd = _first_super_word(block)
    result = jnp.zeros(VECTOR, U32)
    for half in range(2):
        place = 2 * iota(1) + half - odd
        there = (place >= 0) & (place < _used_places(block.layout)) & (iota(0) == 0)
        found = take_lanes(super_bits, lane_of_places(place & (PLACES - 1)))
        result = result | jnp.where(there, found << np.uint32(16 * half), np.uint32(0))
    words.merge(message_ref, first, result)


def _words_of_groups(layout: Layout) -> int:
    """Return the words of the group scales of a row."""
    return layout.groups // 4


def _first_group_word(block: Block) -> Array:
    start = block.layout.group_scales_start // 4
    return start + block.first * _words_of_groups(block.layout)


def _first_super_word(block: Block) -> tuple[Array, Array]:
    """Return the word that holds the first super-scale, and 1 if that is its upper half."""
    return block.layout.super_scales_start // 4 + (block.first >> 1), block.first & 1


def _shifts_of_groups(layout: Layout) -> list[Array]:
    """Return where in its word the group of every sublane has its byte, for every eighth."""
    groups = layout.groups // EIGHTHS  # of an eighth
    in_eighth = iota(0) >> (SUBLANES // groups).bit_length() - 1
    return [((eighth * groups + in_eighth & 3) << 3).astype(U32) for eighth in range(EIGHTHS)]


def _used_places(layout: Layout) -> int:
    return min(layout.rows_per_chunk, PLACES)
