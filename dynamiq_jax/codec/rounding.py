"""Rounding offsets u in [0, 1): one counter-based hash per coordinate for the whole all-reduce.

The rounding events on a coordinate's path share the hash and differ by the hop, so that their
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

_GOLDEN = np.uint32(
    0x9E3779B9
)  # 2^32 / golden ratio: multiples of it fill [0, 1) evenly for any number of hops
_LANE = np.uint32(0x9E3779B1)  # odd, so that lanes map to distinct words


def offsets(
    row_ids: Array, hop: Array | int, seed: Array, rounding: Rounding
) -> Array | np.float32:
    """Offsets for a block of rows.

    Args:
      row_ids: uint32 [rows], `chunk * rows_per_chunk + place`.
      hop: compressions that the chunk has gone through before this one.
      seed: uint32 [2], the same on all workers.
      rounding: see the module; `nearest` is deterministic and biased.

    Returns:
      float32 [rows, 256] in [0, 1), or the scalar 0.5 for `nearest`.
    """
    if rounding == "nearest":
        return np.float32(0.5)
    hop = jnp.asarray(hop).astype(jnp.uint32)
    rows = mix(mix(row_ids ^ seed[0]) + seed[1])
    if rounding == "independent":
        rows = mix(rows + hop * _GOLDEN)
    words = mix(rows[:, None] ^ (np.arange(SUPER_GROUP_SIZE, dtype=np.uint32) * _LANE)[None, :])
    if rounding == "correlated":
        words = words + hop * _GOLDEN
    elif rounding == "stratified":
        words = words ^ _bit_reverse(hop)
    return (words >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)


def mix(word: Array) -> Array:
    """A full-avalanche permutation of 32-bit words with two multiplications (constants of C.
    Wellons, `lowbias32`).
    """
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))


def _bit_reverse(word: Array) -> Array:
    swaps = ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF))
    for shift, mask in [(np.uint32(shift), np.uint32(mask)) for shift, mask in swaps]:
        word = ((word >> shift) & mask) | ((word & mask) << shift)
    return lax.shift_right_logical(word, np.uint32(16)) | (word << np.uint32(16))
