"""Flash Communication: integers of any width, with the extremes of their block.

Papers: arXiv 2412.04964; version 2, arXiv 2508.03760.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.methods import BlockFormat, BlockwiseMethod
from dynamiq_jax.parts import (
    BLOCKS,
    check_choice,
    check_flag,
    check_integer,
    covering_step,
    in_blocks,
    override,
)
from pallas_kernels.codec.scales import (
    LARGEST_BITS,
    NAN_BITS,
    bfloat16_bits,
    bfloat16_value,
    group_maxima,
    reciprocal,
)

_LARGEST_INT = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashCommunication(BlockwiseMethod):
    """Integers 0 .. 2^code_bits - 1 between a block's smallest and largest value, to nearest.

    A block has a zero point, its smallest value as the next bfloat16 below, and the smallest normal
    bfloat16 step that reaches its largest one, so nothing saturates. This costs 32 / block bits a
    coordinate.
    Spike reserving (version 2) keeps the smallest and the largest value of a block as bfloat16,
    with their places as bytes, and quantizes the others in the range that remains: 48 / block bits
    more, 7.5 in all at 5 bits and blocks of 32. Codes of odd widths are sent in planes of 4, 2 and
    1 bits, the paper's bit splitting.

    Made for `topology="all_to_all"`, the papers' two steps; works on every one. A block that holds
    NaN, Inf or a magnitude above 2^126 (8.5e37) decodes to NaN, all of it; a magnitude below 2^-126
    counts as zero. Rounding is biased, and a zero decodes to anything up to half a step from it,
    unless its block is all zeros: the papers compress activations. Differences from the papers:
    zero points and steps are bfloat16 that cover the block; one message with everything inline; of
    equal extremes the last smallest and the first largest are kept; the block size is ours.

    >>> FlashCommunication(code_bits=2, spikes=False).format.row_bytes
    96
    """

    code_bits: int = 5  # of a code, without its share of the rest; one more divides the error by 4
    block: int = 32  # coordinates under 4 bytes, or 10 with spikes; smaller lowers the error
    spikes: bool = True  # keep the two extremes of a block apart: 48 / block bits, pays at few bits

    def __post_init__(self):
        check_integer("code_bits", self.code_bits, 2, 8)
        check_choice("block", self.block, BLOCKS)
        check_flag("spikes", self.spikes)

    @property
    @override
    def format(self) -> BlockFormat:
        """Codes, then zero points and steps, then values of spikes and their places."""
        side_bytes = (2, 2, 2, 2, 1, 1) if self.spikes else (2, 2)
        return BlockFormat(bits=self.code_bits, block=self.block, side_bytes=side_bytes)

    @override
    def encode_rows(self, rows: Array, noise: Array | None) -> tuple[Array, ...]:
        blocks = in_blocks(rows, self.block)
        extremes = _extremes(_ordered(blocks))
        spikes: tuple[Array, ...] = ()
        low, high = _unordered(extremes.low), _unordered(extremes.high)
        is_finite = group_maxima(rows, self.block) <= LARGEST_BITS
        if self.spikes:
            values = (_surfacing(bfloat16_bits(spike), is_finite) for spike in (low, high))
            places = (extremes.low_place, extremes.high_place)
            spikes = (*values, *(place.astype(jnp.uint8) for place in places))
            low, high = _extremes_without(_ordered(blocks), *places)
        zero_bits = _bfloat16_below(low)
        step_bits = covering_step(high - bfloat16_value(zero_bits), self._top)
        inverse = reciprocal(bfloat16_value(step_bits))
        t = (blocks - bfloat16_value(zero_bits)[:, :, None]) * inverse[:, :, None]
        codes = jnp.clip(jnp.round(t), np.float32(0), np.float32(self._top)).astype(jnp.int32)
        sides = (_surfacing(bits, is_finite) for bits in (zero_bits, step_bits))
        # The code of a spike is never read.
        return codes.astype(jnp.uint16).reshape(rows.shape), *sides, *spikes

    @override
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        zero, step = (bfloat16_value(bits)[:, :, None] for bits in sides[:2])
        blocks = in_blocks(codes.astype(jnp.int32).astype(jnp.float32), self.block) * step + zero
        if self.spikes:
            lanes = np.arange(self.block, dtype=np.uint8)
            for bits, place in zip(sides[2:4], sides[4:], strict=True):
                is_spike = lanes[None, None, :] == place[:, :, None]
                blocks = jnp.where(is_spike, bfloat16_value(bits)[:, :, None], blocks)
        return blocks.reshape(codes.shape)

    @property
    def _top(self) -> int:
        return 2**self.code_bits - 1


class _Extremes(NamedTuple):
    """Smallest and largest key of every block, int32 [rows, blocks], and their places."""

    low: Array
    high: Array
    low_place: Array
    high_place: Array


def _extremes(keys: Array) -> _Extremes:
    """Find the last of the smallest and the first of the largest of each block.

    They differ even where all are equal. Keys are int32 [rows, blocks, block].
    """
    low, high = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)
    lanes = np.arange(keys.shape[-1], dtype=np.int32)
    is_low, is_high = keys == low[:, :, None], keys == high[:, :, None]
    low_place = jnp.max(jnp.where(is_low, lanes, np.int32(-1)), axis=-1)
    high_place = jnp.min(jnp.where(is_high, lanes, np.int32(lanes.size)), axis=-1)
    return _Extremes(low, high, low_place, high_place)


def _extremes_without(keys: Array, *places: Array) -> tuple[Array, Array]:
    """Find the smallest and the largest value of every block, except those at `places`: float32."""
    lanes = np.arange(keys.shape[-1], dtype=np.int32)[None, None, :]
    is_left = (lanes != places[0][:, :, None]) & (lanes != places[1][:, :, None])
    low = jnp.min(jnp.where(is_left, keys, _LARGEST_INT), axis=-1)
    high = jnp.max(jnp.where(is_left, keys, -_LARGEST_INT), axis=-1)
    return _unordered(low), _unordered(high)


def _ordered(values: Array) -> Array:
    """Map float32 to int32 of the same order, with NaN outside of all numbers.

    Float reductions of XLA:CPU drop NaN.
    """
    return _flip(lax.bitcast_convert_type(values, jnp.int32))


def _unordered(keys: Array) -> Array:
    return lax.bitcast_convert_type(_flip(keys), jnp.float32)


def _flip(bits: Array) -> Array:
    """Put negative numbers in the order of their values, by flipping all bits but the sign."""
    return bits ^ ((bits >> np.int32(31)) & _LARGEST_INT)


def _bfloat16_below(values: Array) -> Array:
    """Return the largest bfloat16 not above finite values: bits in uint16."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    away_from_zero = (bits >> np.uint32(31)) * np.uint32(0xFFFF)
    return ((bits + away_from_zero) >> np.uint32(16)).astype(jnp.uint16)


def _surfacing(bits: Array, is_finite: Array) -> Array:
    """Replace bits of bfloat16 by NaN where the block is not finite: no code can carry it."""
    return jnp.where(is_finite, bits, NAN_BITS.astype(np.uint16))
