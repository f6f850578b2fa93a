"""A message as words of 32 bits in lines of 128, read and written from any word on.

A register of 8 x 128 words is 1,024 consecutive words of a message. They start at any word, as
planes and scales do: two unaligned loads and one rotation of the lanes.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._mosaic_tpu.vectors import LANES, SUBLANES, U32, iota
from pallas_kernels.codec.layout import Layout

_WORD = 4  # bytes
_LOG_LANES = LANES.bit_length() - 1


def num_lines(layout: Layout) -> int:
    """Return the lines of a message, with room for an access that starts at its last word."""
    used = -(-layout.payload_bytes // (_WORD * LANES))
    return -(-(used + SUBLANES) // SUBLANES) * SUBLANES


def as_lines(payloads: Array, layout: Layout) -> Array:
    """Pad messages, uint32 [count, words], to lines of 128 words, [count, lines, 128]."""
    count, missing = len(payloads), num_lines(layout) * LANES - payloads.shape[1]
    if count == 1:  # as a vector, which a TPU pads faster
        return jnp.pad(payloads.reshape(-1), (0, missing)).reshape(1, -1, LANES)
    return jnp.pad(payloads, ((0, 0), (0, missing))).reshape(count, -1, LANES)


def as_message(lines: Array, layout: Layout) -> Array:
    """Invert `as_lines`, for one message."""
    return lines.reshape(-1)[: layout.payload_bytes // _WORD]


def _line_and_lane(word: Array) -> tuple[Array, Array]:
    # Divisions round towards zero, which takes more instructions.
    return word >> _LOG_LANES, word & (LANES - 1)


def load(ref, first: Array) -> Array:
    """Load 1,024 words from word `first` on."""
    row, shift = _line_and_lane(first)
    here, next_ = ref[pl.ds(row, SUBLANES), :], ref[pl.ds(row + 1, SUBLANES), :]
    return pltpu.roll(jnp.where(iota(1) >= shift, here, next_), LANES - shift, 1)


def merge(ref, first: Array, words: Array) -> None:
    """Set the bits of 1,024 words from word `first` on; zeros change nothing."""
    row, shift = _line_and_lane(first)
    rolled = pltpu.roll(words, shift, 1)
    in_first = iota(1) >= shift
    for at, mine in ((row, in_first), (row + 1, ~in_first)):
        rows = pl.ds(at, SUBLANES)
        ref[rows, :] = ref[rows, :] | jnp.where(mine, rolled, np.uint32(0))


def clear(ref) -> None:
    """Write zeros to a whole message."""
    zeros = jnp.zeros((SUBLANES, LANES), U32)

    def clear_rows(index: Array, _: None) -> None:
        ref[pl.ds(pl.multiple_of(index * SUBLANES, SUBLANES), SUBLANES), :] = zeros

    lax.fori_loop(0, ref.shape[0] // SUBLANES, clear_rows, None)
