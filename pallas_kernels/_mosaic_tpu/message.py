"""The part of a block in a message: planes of codes, and scales.

A plane of a block is one register: a sublane is a word of the 8 of a row. Scales are read and
written like planes, 1,024 words at a time, of which they are the first; a gather along the lanes
brings them to the lanes of their places.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels._mosaic_tpu import words
from pallas_kernels._mosaic_tpu.blocks import Block
from pallas_kernels._mosaic_tpu.vectors import (
    EIGHTHS,
    I32,
    LANES,
    PLACES,
    QUARTERS,
    SUBLANES,
    U32,
    VECTOR,
    iota,
    lane_of_places,
    over_segments,
    places_of_lanes,
    sublane,
    swap,
    take_lanes,
)
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.scales import energies_of

_PLANES_OF_BRANCH = 4


class Scales(NamedTuple):
    """Scales of the rows of a block."""

    groups: list[Array]  # of every eighth, repeated in the sublanes of a group, uint32 [8, 128]
    super_bits: Array  # bits of bfloat16, uint32 [8, 128]


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
    return UNIT // 4 * (block.starts[bit] + block.first)


def load_scales(layout: Layout, first: Array, message_ref) -> Scales:
    """Load the scales of the places from `first` on."""
    count = layout.groups // 4  # words of a row
    loaded = words.load(message_ref, _first_group_word(layout, first))
    # Word w of a place is at sublane w of its lane.
    at = places_of_lanes() * count + (iota(0) & (count - 1))
    row, lane = at >> 7, at & (LANES - 1)
    of_lanes = jnp.zeros(VECTOR, U32)
    for index in range(count):
        found = take_lanes(sublane(loaded, index), lane)
        of_lanes = jnp.where(row == index, found, of_lanes)
    eighths = [sublane(of_lanes, eighth * count // EIGHTHS) for eighth in range(EIGHTHS)]
    groups = _groups(layout, eighths)
    word, odd = _first_super_word(layout, first)
    supers = sublane(words.load(message_ref, word), 0)
    half = places_of_lanes() + odd
    return Scales(groups, _half(take_lanes(supers, half >> 1), half))


def find_scales(layout: Layout, places: Array, message_ref) -> Scales:
    """Load the scales of the places of all lanes, int32 [8, 128], repeated in all sublanes."""
    count = layout.groups // 4  # words of a row
    groups, supers = layout.group_scales_start // 4, layout.super_scales_start // 4
    wanted = [groups + places * count + word for word in range(count)]
    found = words.find(message_ref, wanted, groups, supers)
    eighths = [found[eighth * count // EIGHTHS] for eighth in range(EIGHTHS)]
    wanted = [supers + (places >> 1)]
    (found_half,) = words.find(message_ref, wanted, supers, -(-layout.padding_start // 4))
    return Scales(_groups(layout, eighths), _half(found_half, places))


def row_energies(layout: Layout, of_rows: Scales) -> Array:
    """Compute logarithms of the energies of rows, int32 [8, 128]; see `codec.scales`."""
    squares = functools.reduce(jnp.add, (jnp.square(group.astype(I32)) for group in of_rows.groups))
    # Each group counts in all of its sublanes.
    repeated = over_segments(squares, SUBLANES, jnp.add)
    squares = repeated >> ((layout.group_size // QUARTERS).bit_length() - 1)
    return energies_of(squares, of_rows.super_bits).astype(I32)


def merge_scales(block: Block, of_rows: Scales, message_ref) -> None:
    """Store what `load_scales` loads."""
    layout = block.layout
    count, used = layout.groups // 4, min(layout.rows_per_chunk, PLACES)
    shifts = _shifts_of_groups(layout)
    shifted = [group << shift for group, shift in zip(of_rows.groups, shifts, strict=True)]
    at = iota(0) * LANES + iota(1)  # of a word among those of the block
    place, word = at >> (count.bit_length() - 1), at & (count - 1)
    lane = lane_of_places(place & (PLACES - 1))
    result = jnp.zeros(VECTOR, U32)
    for index in range(count):
        of_word = shifted[index * EIGHTHS // count : (index + 1) * EIGHTHS // count]
        joined = _or_over_groups(of_word, layout)
        result = jnp.where(word == index, take_lanes(joined, lane), result)
    result = jnp.where(place < used, result, np.uint32(0))
    words.merge(message_ref, _first_group_word(layout, block.first), result)
    first, odd = _first_super_word(layout, block.first)
    result = jnp.zeros(VECTOR, U32)
    for half in range(2):
        place = 2 * iota(1) + half - odd
        there = (place >= 0) & (place < used) & (iota(0) == 0)
        found = take_lanes(of_rows.super_bits, lane_of_places(place & (PLACES - 1)))
        result = result | jnp.where(there, found << np.uint32(16 * half), np.uint32(0))
    words.merge(message_ref, first, result)


def _groups(layout: Layout, eighths: Sequence[Array]) -> list[Array]:
    """Return the group scales from the words that hold those of every eighth."""
    shifts = _shifts_of_groups(layout)
    return [(word >> shift) & np.uint32(0xFF) for word, shift in zip(eighths, shifts, strict=True)]


def _or_over_groups(parts: Sequence[Array], layout: Layout) -> Array:
    """Join bytes of words, which are repeated in the sublanes of their groups, in all sublanes."""
    joined = functools.reduce(jnp.bitwise_or, parts)
    sublanes_of_group = layout.group_size // QUARTERS
    if sublanes_of_group == SUBLANES:
        return joined
    # The groups of an eighth hold different bytes: bring each to all sublanes.
    firsts = range(0, SUBLANES, sublanes_of_group)
    return functools.reduce(jnp.bitwise_or, (sublane(joined, first) for first in firsts))


def _half(word: Array, index: Array) -> Array:
    """Return the lower half of a word for an even index, and the upper one for an odd one."""
    return (word >> ((index & 1) << 4).astype(U32)) & np.uint32(0xFFFF)


def _first_group_word(layout: Layout, first: Array) -> Array:
    return layout.group_scales_start // 4 + first * (layout.groups // 4)


def _first_super_word(layout: Layout, first: Array) -> tuple[Array, Array]:
    """Return the word that holds a super-scale, and 1 if that is its upper half."""
    return layout.super_scales_start // 4 + (first >> 1), first & 1


def _shifts_of_groups(layout: Layout) -> list[Array]:
    """Return where in its word the group of every sublane has its byte, for every eighth."""
    groups = layout.groups // EIGHTHS  # of an eighth
    in_eighth = iota(0) >> (SUBLANES // groups).bit_length() - 1
    return [((eighth * groups + in_eighth & 3) << 3).astype(U32) for eighth in range(EIGHTHS)]
