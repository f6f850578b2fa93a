"""Widths of rows by Mosaic TPU kernels: norms and energies, from which they follow, and the search.

XLA makes some dozens of small programs of the search of `codec.allocation`, each of which takes
longer than its work. A step of that kernel solves for 8 chunks: a sublane is a chunk, or a part of
one if there are fewer.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._jax.compat import shape_like
from pallas_kernels._mosaic_tpu import launch, message, transfers, words
from pallas_kernels._mosaic_tpu.blocks import num_blocks
from pallas_kernels._mosaic_tpu.vectors import (
    F32,
    I32,
    LANES,
    PLACES,
    SUBLANES,
    VECTOR,
    iota,
    lane_of_places,
    over_segments,
    take_lanes,
)
from pallas_kernels.codec import MAX_WIDTH, SUPER_GROUP_SIZE, Layout, l2_norm
from pallas_kernels.codec.allocation import ENERGY_LIMIT

_BLOCKS_OF_STEP = 8  # of the statistics
_NO_ROW = -(2**30)  # below all thresholds
_VECTORS_OF_TURN = 8


def statistics(values: Array) -> Array:
    """Compute the norm of every row."""
    num_rows = values.shape[0]
    # Lines of two dimensions, also of bfloat16: pairs of these are words of rows as they are.
    lines = transfers.as_lines(values).reshape(-1, LANES)
    count = -(-num_rows // PLACES)  # vectors of 128 norms
    of_step = min(_BLOCKS_OF_STEP, count)
    block = of_step * PLACES * len(lines) // num_rows, LANES

    def kernel(step, lines_ref, norms_ref, values_ref):
        of_block = lines_ref.shape[0] // of_step
        for index in range(of_step):
            transfers.load_values(lines_ref.at[pl.ds(index * of_block, of_block)], values_ref)
            norms_ref[index : index + 1, :] = l2_norm(values_ref[...], axis=0)[None]

    shape = shape_like((count, LANES), F32, values)
    [norms] = launch.launch(
        kernel,
        -(-count // of_step),
        [(lines, pl.BlockSpec(block, lambda step: (step, 0)))],
        [(shape, pl.BlockSpec((of_step, LANES), lambda step: (step, 0)))],
        [pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32)],
        name="statistics",
    )
    return norms.reshape(-1)[:num_rows]


def energies(payloads: Array, *, layout: Layout) -> Array:
    """Compute logarithms of the energies of the rows of messages."""
    blocks, count = num_blocks(layout), len(payloads)

    def kernel(step, received_ref, energies_ref, message_ref, semaphore):
        index = step // blocks
        block = step - index * blocks

        @pl.when(block == 0)
        def _() -> None:
            transfers.run(words.copy_in(received_ref, index, message_ref, layout, semaphore))

        scales = message.load_scales(layout, block * PLACES, message_ref)
        found = message.row_energies(layout, scales)
        in_order = take_lanes(found, lane_of_places(iota(1)))
        energies_ref[...] = in_order[:1, :][None]

    of_blocks = shape_like((count * blocks, 1, PLACES), I32, payloads)
    [found] = launch.launch(
        kernel,
        count * blocks,
        [(words.as_operand(payloads, layout), launch.IN_MEMORY)],
        [(of_blocks, pl.BlockSpec((1, 1, PLACES), lambda step: (step, 0, 0)))],
        [words.memory(layout), pltpu.SemaphoreType.DMA],
        name="energies",
    )
    return found.reshape(count, -1)[:, : layout.rows_per_chunk]


class _Found(NamedTuple):
    """State of the search, of every chunk: float32 but for the price, int32 [8, 128]."""

    price: Array  # the highest one that is known to be too low
    wider: list[Array]  # rows that take every step at it
    rows: list[Array]  # rows that take every step at the lowest price that is not too low


def solve(energies: Array, *, layout: Layout) -> Array:
    """Solve for the rows of every plane."""
    steps = layout.allocation.steps
    sizes = [np.float32(step.after - step.before) for step in steps]
    needed = [np.int32(step.energy) for step in steps]  # by a row, relative to the price
    # Threshold above which the first step is not raised: only zeros may have no bits.
    least = np.int32(2 * ENERGY_LIMIT if 0 in layout.allocation.widths else 1)
    lowest = -2 * int(needed[-1]) - 1  # a price that is too low
    digits = (ENERGY_LIMIT - lowest).bit_length()
    chunks, rows = energies.shape
    parts = max(part for part in (1, 2, 4, 8) if part * chunks <= SUBLANES or part == 1)
    columns = -(-rows // (parts * _VECTORS_OF_TURN * LANES)) * _VECTORS_OF_TURN * LANES
    groups = -(-chunks * parts // SUBLANES)
    # Nobody else can use what rows of zeros get.
    energies = jnp.where(energies > 0, energies, -needed[-1])
    energies = jnp.pad(
        energies, ((0, 0), (0, parts * columns - rows)), constant_values=np.int32(_NO_ROW)
    ).reshape(chunks * parts, columns)
    missing = groups * SUBLANES - chunks * parts
    energies = jnp.pad(energies, ((0, missing), (0, 0)), constant_values=np.int32(_NO_ROW))

    def kernel(_, energies_ref, result_ref):
        def narrow(index: Array, found: _Found) -> _Found:
            price = found.price + (np.int32(1 << (digits - 1)) >> index)
            first, *others = (price + energy for energy in needed)
            tried = _count(energies_ref, [jnp.minimum(first, least), *others], parts)
            bits = functools.reduce(jnp.add, map(jnp.multiply, tried, sizes))
            is_low = bits > layout.units
            return _Found(
                jnp.where(is_low, price, found.price),
                [jnp.where(is_low, *both) for both in zip(tried, found.wider, strict=True)],
                [jnp.where(is_low, *both) for both in zip(found.rows, tried, strict=True)],
            )

        # At the lowest price, all rows take every step.
        everything = [jnp.full(VECTOR, rows, F32) for _ in sizes]
        found = _Found(jnp.full(VECTOR, lowest, I32), everything, everything)
        found = lax.fori_loop(0, digits, narrow, found)
        of_steps = _share(found, sizes, layout.units)
        result = jnp.zeros(VECTOR, F32)
        for step, rows_of_step in zip(steps, of_steps, strict=True):
            for bit in range(step.before, step.after):
                result = jnp.where(iota(1) == bit, rows_of_step, result)
        result_ref[...] = result.astype(I32)

    shape = shape_like((groups * SUBLANES, LANES), I32, energies)
    [result] = launch.launch(
        kernel,
        groups,
        [(energies, pl.BlockSpec((SUBLANES, columns), lambda step: (step, 0)))],
        [(shape, pl.BlockSpec(VECTOR, lambda step: (step, 0)))],
        [],
        name="solve",
    )
    return result[: chunks * parts : parts, :MAX_WIDTH]


def _count(energies_ref, thresholds: list[Array], parts: int) -> list[Array]:
    """Count the rows above each threshold: whole numbers, float32 [8, 128]."""

    def add(turn: Array, counts: list[Array]) -> list[Array]:
        first = turn * (_VECTORS_OF_TURN * LANES)
        for vector in range(_VECTORS_OF_TURN):
            lanes = pl.ds(pl.multiple_of(first + vector * LANES, LANES), LANES)
            energies = energies_ref[:, lanes]
            counts = [
                counted + jnp.where(energies >= threshold, np.float32(1), np.float32(0))
                for counted, threshold in zip(counts, thresholds, strict=True)
            ]
        return counts

    turns = energies_ref.shape[1] // (_VECTORS_OF_TURN * LANES)
    counts = [jnp.zeros(VECTOR, F32) for _ in thresholds]
    counts = lax.fori_loop(0, turns, add, counts)
    # Over the lanes and the sublanes of a chunk, repeated in all of them.
    sums = (jnp.broadcast_to(jnp.sum(each, axis=1, keepdims=True), VECTOR) for each in counts)
    return [over_segments(total, parts, jnp.add) for total in sums]


def _share(found: _Found, sizes: list[np.float32], units: int) -> list[Array]:
    """Return the rows that take each step: all that can pay, and some at the price below.

    What is left then goes to rows that would be wider at the price below.
    """
    left = jnp.full(VECTOR, units, F32)
    for rows, size in zip(found.rows, sizes, strict=True):
        left = left - rows * size
    result = []
    for rows, wider, size in zip(found.rows, found.wider, sizes, strict=True):
        more = wider - rows
        result.append(rows + jnp.clip(_whole_share(left, size), 0, more))
        left = left - more * size
    return result


def _whole_share(left: Array, size: np.float32) -> Array:
    """Divide whole numbers and round down."""
    share = jnp.floor(left * (np.float32(1) / size))
    rest = left - share * size
    share = jnp.where(rest < 0, share - 1, share)
    return jnp.where(rest >= size, share + 1, share)
