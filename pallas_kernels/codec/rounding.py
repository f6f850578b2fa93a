"""Rounding offsets in (0, 1): 16 bits of a counter-based hash for each coordinate of an all-reduce.

All compressions on a coordinate's path share the hash and differ by their turn, so that their
errors cancel (paper, section 5, in a cheaper form: no table in memory, and no dependence on the
number of workers). Each offset is uniform, so every single rounding is unbiased. A chain of hops is
not quite: the input of a hop depends on the noise that it shares with the hop before. `independent`
rounding has a new hash for every turn, and so no bias at all.

Offsets of DynamiQ round numbers up and down, not magnitudes: `rows.encode_rows` mirrors those of
negative values. The errors of workers then cancel even where their signs differ.
"""

from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.shapes import Float32, UInt32
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE

Rounding = Literal["correlated", "independent", "nearest"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

_HALF = np.uint32(SUPER_GROUP_SIZE // 2)
# Multiples of the golden ratio fill [0, 1) evenly for any number of hops. Both halves of this word
# are 2^16 / golden ratio.
_GOLDEN = np.uint32(0x9E379E37)
_LANE = np.uint32(0x9E3779B1)  # odd, so that lanes map to distinct words


def offsets(
    row_ids: UInt32[Array, "rows"], turn: Index, seed: UInt32[Array, "2"], rounding: Rounding
) -> Float32[Array, "rows 256"] | np.float32:
    """Compute the offsets of a block of rows; see section 4 of docs/wire_format.md.

    Args:
      row_ids: `chunk * rows_per_chunk + place`.
      turn: number of the compression on the path.
      seed: the same on all workers.
      rounding: see the module; `nearest` is deterministic and biased.

    Returns:
      Numbers in (0, 1), or the scalar 0.5 for `nearest`.
    """
    if rounding == "nearest":
        return np.float32(0.5)
    # Both lanes of a pair compute the word: XLA:CPU vectorizes that, and does not vectorize one
    # word that is spread over two lanes.
    lanes = jnp.arange(SUPER_GROUP_SIZE, dtype=jnp.uint32)
    rows = row_words(row_ids, turn, seed, rounding)
    words = lane_words(rows[:, None], (lanes % _HALF)[None, :], turn, rounding)
    return half_to_offset(words >> (lanes // _HALF * np.uint32(16))[None, :])


def row_words(
    row_ids: UInt32[Array, "*rows"], turn: Index, seed: Any, rounding: Rounding
) -> UInt32[Array, "*rows"]:
    """Compute the part of the hash that all lanes of a row share.

    The words of the seed may be an array, a tuple or a reference of a kernel.
    """
    words = mix(mix(row_ids ^ seed[0]) + seed[1])
    return mix(words + _uint32(turn) * _GOLDEN) if rounding == "independent" else words


def lane_words(rows: Array, lanes: Array, turn: Index, rounding: Rounding) -> Array:
    """Combine the words of rows with `lanes`, uint32 below 128; the shapes broadcast.

    The low halves of the results are the offsets of `lanes`, and the high ones of `lanes + 128`.
    """
    # The word of the row is mixed already: `mix` without its first step suffices for the lanes.
    words = _mix_mixed(rows + lanes * _LANE)
    return words + _uint32(turn) * _GOLDEN if rounding == "correlated" else words


def half_to_offset(words: Array) -> Array:
    """Convert the low half h of uint32 words to (h + 1/2) / 2^16, float32."""
    # By its bits, which is cheaper than a conversion.
    bits = (words & np.uint32(0xFFFF)) | np.uint32(0x43000000)  # 128 + h / 2^16
    return lax.bitcast_convert_type(bits, jnp.float32) - np.float32(128 - 2**-17)


def mix(word: Array) -> Array:
    """Permute 32-bit words with full avalanche (`lowbias32`, constants of C. Wellons)."""
    return _mix_mixed(word ^ (word >> np.uint32(16)))


def _mix_mixed(word: Array) -> Array:
    word = word * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))


def _uint32(value: Index) -> Array:
    return jnp.asarray(value).astype(jnp.uint32)
