"""Rounding offsets u in (0, 1): half a counter-based hash per coordinate for the whole all-reduce.

The rounding events on a coordinate's path share the hash and differ by the turn, so that their
errors cancel (paper, section 5, in a cheaper form): no table in memory, no knowledge of the number
of workers. The marginal of each offset is uniform, which keeps every single rounding unbiased. The
chain of hops is not quite: a hop's input depends on the noise that it shares. `independent` is.
"""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE

Rounding = Literal["correlated", "stratified", "independent", "nearest"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

_HALF = np.uint32(SUPER_GROUP_SIZE // 2)
# Multiples of the golden ratio fill [0, 1) evenly for any number of hops. Both halves of this word
# are 2^16 / golden ratio.
_GOLDEN = np.uint32(0x9E379E37)
_LANE = np.uint32(0x9E3779B1)  # odd, so that lanes map to distinct words


def offsets(
    row_ids: Array, turn: Array | int, seed: Array, rounding: Rounding
) -> Array | np.float32:
    """Offsets for a block of rows.

    Args:
      row_ids: uint32 [rows], `chunk * rows_per_chunk + place`.
      turn: number of this compression of the chunk, see section 4 of docs/wire_format.md.
      seed: uint32 [2], the same on all workers.
      rounding: see the module; `nearest` is deterministic and biased.

    Returns:
      float32 [rows, 256] in (0, 1), or the scalar 0.5 for `nearest`.
    """
    if rounding == "nearest":
        return np.float32(0.5)
    # Both lanes of a pair make the word again: XLA:CPU vectorises that, and does not vectorise one
    # word that is spread over two lanes.
    lanes = jnp.arange(SUPER_GROUP_SIZE, dtype=jnp.uint32)
    words = offset_words(row_words(row_ids, turn, seed, rounding), lanes % _HALF, turn, rounding)
    return half_to_offset(words >> (lanes // _HALF * np.uint32(16))[None, :])


def row_words(row_ids: Array, turn: Array | int, seed: Array, rounding: Rounding) -> Array:
    """The share of the hash that all lanes of a row have in common: uint32 [rows]."""
    words = mix(mix(row_ids ^ seed[0]) + seed[1])
    return mix(words + _uint32(turn) * _GOLDEN) if rounding == "independent" else words


def offset_words(rows: Array, lanes: Array, turn: Array | int, rounding: Rounding) -> Array:
    """Words uint32 [rows, lanes] whose low halves are the offsets of `lanes`, uint32 below 128, and
    whose high halves those of `lanes + 128`.
    """
    return lane_words(rows[:, None], lanes[None, :], turn, rounding)


def lane_words(rows: Array, lanes: Array, turn: Array | int, rounding: Rounding) -> Array:
    """`offset_words` of words and lanes whose shapes broadcast."""
    # The row's words are mixed already: `mix` without its first step does for the lanes.
    words = _mix_mixed(rows ^ (lanes * _LANE))
    if rounding == "correlated":
        words = words + _uint32(turn) * _GOLDEN
    elif rounding == "stratified":
        words = words ^ (_bit_reverse_16(_uint32(turn)) * np.uint32(0x10001))
    return words


def half_to_offset(words: Array) -> Array:
    """The low half h of uint32 words to (h + 1/2) / 2^16, float32: by its bits, which is cheaper
    than a conversion.
    """
    bits = (words & np.uint32(0xFFFF)) | np.uint32(0x43000000)  # 128 + h / 2^16
    return lax.bitcast_convert_type(bits, jnp.float32) - np.float32(128 - 2**-17)


def mix(word: Array) -> Array:
    """A full-avalanche permutation of 32-bit words with two multiplications (constants of C.
    Wellons, `lowbias32`).
    """
    return _mix_mixed(word ^ (word >> np.uint32(16)))


def _mix_mixed(word: Array) -> Array:
    word = word * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))


def _bit_reverse_16(word: Array) -> Array:
    swaps = ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF))
    for shift, mask in [(np.uint32(shift), np.uint32(mask)) for shift, mask in swaps]:
        word = ((word >> shift) & mask) | ((word & mask) << shift)
    return word


def _uint32(value: Array | int) -> Array:
    return jnp.asarray(value).astype(jnp.uint32)
