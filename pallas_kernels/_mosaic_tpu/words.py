"""A message as words of 32 bits in lines of 128, read and written from any word on.

A register of 8 x 128 words is 1,024 consecutive words of a message. They start at any word, as
planes and scales do: two unaligned loads and one rotation of the lanes.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import modes
from pallas_kernels._jax import compat
from pallas_kernels._mosaic_tpu.vectors import LANES, SUBLANES, U32, iota, over_segments, take_lanes
from pallas_kernels.codec.layout import Layout

_WORD = 4  # bytes
_LIMIT = 48 * 2**20  # bytes of messages in vector memory, of which a v5p has 64 MiB
_VECTORS_OF_TURN = 16
_LOG_LANES = LANES.bit_length() - 1


def num_lines(layout: Layout) -> int:
    """Return the lines of a message, with room for an access that starts at its last word."""
    return -(-(_used_lines(layout) + SUBLANES) // SUBLANES) * SUBLANES


def as_operand(payloads: Array, layout: Layout) -> Array:
    """Join messages, uint32 [count, words], to an array of whole lines each."""
    missing = _used_lines(layout) * LANES - payloads.shape[1]
    if missing:
        payloads = jnp.pad(payloads, ((0, 0), (0, missing)))
    return payloads.reshape(result_shape(layout, len(payloads)))


def result_shape(layout: Layout, count: int = 1) -> tuple[int, ...]:
    """Return the shape of `as_operand` of some messages."""
    # A vector, as which messages travel: XLA would copy it to make lines of it.
    lines = count * _used_lines(layout)
    return (lines * LANES,) if _has_vectors() else (lines, LANES)


def as_message(result: Array, layout: Layout) -> Array:
    """Invert `as_operand`, for one message."""
    return result.reshape(-1)[: layout.payload_bytes // _WORD]


def copy_in(operand_ref, index: Array | int, lines_ref, layout: Layout, semaphore) -> Any:
    """Return the copy of a message from HBM to vector memory, which is not started."""
    size = result_shape(layout)[0]
    first = pl.multiple_of(jnp.asarray(index) * size, size)
    source = operand_ref.at[pl.ds(first, size)]
    return pltpu.make_async_copy(source, _used(lines_ref, size), semaphore)


def copy_out(lines_ref, result_ref, semaphore) -> Any:
    """Return the copy of a message from vector memory to HBM, which is not started."""
    return pltpu.make_async_copy(_used(lines_ref, result_ref.shape[0]), result_ref, semaphore)


def why_too_large(layout: Layout, count: int) -> str | None:
    """Return the reason why a kernel cannot hold as many messages; None if it can."""
    size = 4 * LANES * num_lines(layout) * count
    if size <= _LIMIT:
        return None
    return (
        f"{count} messages of {layout.payload_bytes:,} bytes are more than the {_LIMIT:,} bytes of "
        "vector memory that its kernels use, into which smaller buckets fit"
    )


def memory(layout: Layout, *counts: int) -> Any:
    """Return vector memory for a message, or for as many of them."""
    return pltpu.VMEM((*counts, num_lines(layout), LANES), U32)


def _has_vectors() -> bool:
    """Return whether lines can be viewed as a vector, which the interpreter does not copy to."""
    return compat.mosaic_tpu_views_vectors() and not modes.interpreting()


def _used(lines_ref, size: int) -> Any:
    """Return the first lines or words of a message, as an operand has them."""
    if _has_vectors():
        lines_ref = lines_ref.reshape(lines_ref.shape[0] * LANES)
    return lines_ref.at[pl.ds(0, size)]


def _used_lines(layout: Layout) -> int:
    return -(-layout.payload_bytes // (_WORD * LANES))


def _line_and_lane(word: Array) -> tuple[Array, Array]:
    # Divisions round towards zero, which takes more instructions.
    return word >> _LOG_LANES, word & (LANES - 1)


def load(ref, first: Array) -> Array:
    """Load 1,024 words from word `first` on."""
    row, shift = _line_and_lane(first)
    here, next_ = ref[pl.ds(row, SUBLANES), :], ref[pl.ds(row + 1, SUBLANES), :]
    return pltpu.roll(jnp.where(iota(1) >= shift, here, next_), LANES - shift, 1)


def find(ref, wanted: Sequence[Array], start: int, end: int) -> list[Array]:
    """Load any words from `start` to `end`, int32 [8, 128], the same in all sublanes."""
    first_line = start >> _LOG_LANES
    lines = -(-end // LANES) - first_line
    turns = -(-lines // (SUBLANES * _VECTORS_OF_TURN))
    of_turn = -(-lines // (SUBLANES * turns))
    at = [_line_and_lane(word) for word in wanted]

    def look(turn: Array | int, found: list[Array]) -> list[Array]:
        for vector in range(of_turn):
            line = first_line + SUBLANES * (turn * of_turn + vector)
            # What lies behind the end is looked at a second time.
            line = jnp.minimum(line, ref.shape[0] - SUBLANES)
            here = ref[pl.ds(line, SUBLANES), :]
            lines = iota(0) + line
            found = [
                jnp.where(lines == row, take_lanes(here, lane), before)
                for before, (row, lane) in zip(found, at, strict=True)
            ]
        return found

    found = [jnp.zeros((SUBLANES, LANES), U32) for _ in wanted]
    found = look(0, found) if turns == 1 else lax.fori_loop(0, turns, look, found)
    return [over_segments(each, SUBLANES, jnp.bitwise_or) for each in found]


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
