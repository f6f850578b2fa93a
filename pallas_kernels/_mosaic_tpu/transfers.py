"""Rows between HBM and the vectors of a block.

Each row is one copy of its own, since the rows of a block lie anywhere in the bucket. The copies of
a block run while the one before is computed. A float32 row is two rows of 128 in memory. A bfloat16
row is one row of 128 words: the hardware keeps lanes `j` and `j + 128` in one.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels import modes
from pallas_kernels._mosaic_tpu.vectors import (
    F32,
    HALVES,
    LANES,
    PLACES,
    U32,
    as_float,
    place_of_lane,
)


def as_lines(rows: Array) -> Array:
    """View rows [num_rows, 256] as kernels copy them."""
    if rows.dtype == jnp.bfloat16:
        halves = rows.reshape(-1, HALVES, LANES)
        if not modes.interpreting():
            return halves
        # The interpreter does not view a ref in another type.
        low, high = (lax.bitcast_convert_type(halves[:, i], jnp.uint16).astype(U32) for i in (0, 1))
        return (low | high << np.uint32(16))[:, None]
    return rows.astype(F32).reshape(-1, LANES)


def lines_of_row(dtype: DTypeLike) -> int:
    """Return the lines that a row has in memory."""
    return 1 if dtype in (jnp.bfloat16, U32) else HALVES


def staging(dtype: DTypeLike) -> Any:
    """Return memory for the rows of a block."""
    if dtype == jnp.bfloat16:
        return pltpu.VMEM((PLACES, LANES), U32)
    return pltpu.VMEM((HALVES * PLACES, LANES), F32)


def gather(order_ref, lines_ref, staged_ref, semaphore, lanes: Iterable[Any]) -> None:
    """Start to copy the rows of places to their lanes."""
    for row, lane in _lines_of_lanes(order_ref, lines_ref, staged_ref, lanes):
        pltpu.make_async_copy(row, lane, semaphore).start()


def scatter(order_ref, staged_ref, lines_ref, semaphore, lanes: Iterable[Any]) -> None:
    """Start to copy the rows of a block to where `gather` finds them."""
    for row, lane in _lines_of_lanes(order_ref, lines_ref, staged_ref, lanes):
        pltpu.make_async_copy(lane, row, semaphore).start()


def wait(staged_ref, semaphore, lanes: list[int]) -> None:
    """Wait for the copies of a block, of which the semaphore counts the bytes."""
    lines = lines_of_row(staged_ref.dtype) * len(lanes)
    part = staged_ref.at[pl.ds(0, lines)]
    pltpu.make_async_copy(part, part, semaphore).wait()


def run(copy: Any) -> None:
    """Start a copy and wait for it."""
    copy.start()
    copy.wait()


def load_values(staged_ref, values_ref) -> None:
    """Bring the rows of a block from lines to vectors, in the order of coordinates."""
    if staged_ref.dtype != F32:
        words = staged_ref[...]
        words = (words if words.dtype == U32 else pltpu.bitcast(words, U32)).T
        values_ref[:LANES, :] = as_float(words << np.uint32(16))
        values_ref[LANES:, :] = as_float(words & np.uint32(0xFFFF0000))
        return
    for half in range(HALVES):
        lines = staged_ref[pl.ds(half, PLACES, HALVES), :]
        values_ref[half * LANES : (half + 1) * LANES, :] = lines.T


def store_values(values_ref, staged_ref) -> None:
    """Invert `load_values`, for float32."""
    for half in range(HALVES):
        lines = values_ref[half * LANES : (half + 1) * LANES, :].T
        staged_ref[pl.ds(half, PLACES, HALVES), :] = lines


def store_values_in_order(values_ref, lines_ref) -> None:
    """Bring vectors to lines in the order of the places."""
    for half in range(HALVES):
        lines = values_ref[half * LANES : (half + 1) * LANES, :].T
        for first in range(0, PLACES, 8):  # 8 lanes hold every 16th place
            at = HALVES * place_of_lane(first) + half
            lines_ref[pl.ds(at, 8, 16 * HALVES), :] = lines[first : first + 8, :]


def _lines_of_lanes(order_ref, lines_ref, staged_ref, lanes: Iterable[Any]) -> Iterator[Any]:
    """Yield where the row of each lane lies in the bucket, and where in the block."""
    for lane in lanes:
        row = order_ref[0, 0, place_of_lane(lane)]
        yield _line(lines_ref, row), _line(staged_ref, lines_of_row(staged_ref.dtype) * lane)


def _line(ref, first: Array | int) -> Any:
    """Return the part of an array of lines that holds a row, given its first line."""
    if ref.dtype == jnp.bfloat16:
        ref = ref.bitcast(U32)
    if ref.dtype == U32:
        return ref.at[first] if ref.ndim == 3 else ref.at[pl.ds(first, 1)]
    return ref.at[pl.ds(first, HALVES)]
