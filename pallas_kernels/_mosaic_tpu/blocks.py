"""The places of one step of a kernel, their widths and their levels.

A block is 128 consecutive places of a chunk. The last one is moved back to end with the chunk, so
some places are handled twice, with the same result. In a chunk of fewer rows the last lanes hold
nothing. Rows of a block may differ in width: all numbers that depend on it are looked up for every
lane.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels._mosaic_tpu.vectors import (
    I32,
    LANES,
    PLACES,
    SUBLANES,
    VECTOR,
    place_of_lane,
    places_of_lanes,
    sublane,
    take_lanes,
)
from pallas_kernels.codec import MAX_WIDTH, Layout
from pallas_kernels.codec.levels import Levels, QuadraticLevels, top_code

NUM_STARTS = MAX_WIDTH + 1  # of the planes of a chunk
_LEAST_SQUARE = np.float32(2.0**-60)


def num_blocks(layout: Layout) -> int:
    """Return the blocks of a chunk."""
    return -(-layout.rows_per_chunk // PLACES)


def used_lanes(layout: Layout) -> list[int]:
    """Return the lanes that hold a place."""
    return [lane for lane in range(LANES) if place_of_lane(lane) < layout.rows_per_chunk]


def order_of_blocks(layout: Layout, order: Array, lines_of_row: int) -> Array:
    """Return the first lines of the rows of all places, int32 [chunks * blocks, 1, 128].

    They are counted here, once, and not for every copy.
    """
    rows = layout.rows_per_chunk
    order = jnp.pad(order, ((0, 0), (0, max(PLACES - rows, 0))))
    if rows > PLACES and rows % PLACES:
        whole = rows // PLACES * PLACES
        order = jnp.concatenate([order[:, :whole], order[:, -PLACES:]], axis=1)
    return (order * lines_of_row).reshape(-1, 1, PLACES)


@dataclasses.dataclass(frozen=True)
class Block:
    """128 places of a chunk."""

    layout: Layout
    chunk: Array  # int32
    first: Array  # place of the chunk, int32
    starts: list[Array]  # of all planes and the end of the last, in units of 32 bytes, int32
    places: Array  # of the chunk, int32 [8, 128]
    widths: Array  # of the lanes, int32 [8, 128]
    levels: Levels  # of the lanes, float32 [8, 128] each
    top: Array  # largest magnitudes of the lanes, which are also masks of them: uint32 [8, 128]

    @classmethod
    def load(cls, layout: Layout, chunk: Array, index: Array, starts_ref, table_ref) -> "Block":
        """Return block `index` of a chunk; the table is that of `level_table`."""
        first = jnp.minimum(index * PLACES, max(layout.rows_per_chunk - PLACES, 0))
        first_start = chunk * NUM_STARTS
        starts = [starts_ref[first_start + bit] for bit in range(NUM_STARTS)]
        places = places_of_lanes() + first
        widths = jnp.zeros(VECTOR, I32)
        for bit in range(max(layout.allocation.widths)):
            widths = widths + (places < starts[bit + 1] - starts[bit]).astype(I32)
        levels = _levels(layout, widths, table_ref)
        return cls(layout, chunk, first, starts, places, widths, levels, top_code(levels))

    def has_wider(self, width: int) -> Array:
        """Return whether a place has codes of more bits."""
        return self.starts[width + 1] - self.starts[width] > self.first


def _levels(layout: Layout, widths: Array, table_ref) -> Levels:
    numbers, structure = layout.quantizer.level_table()
    count = numbers.shape[1]
    looked_up = [
        take_lanes(table_ref[number : number + SUBLANES, :], widths)
        for number in range(0, count, SUBLANES)
    ]
    columns = [sublane(looked_up[i // SUBLANES], i % SUBLANES) for i in range(count)]
    return jax.tree.unflatten(structure, columns)


def level_table(layout: Layout) -> np.ndarray:
    """Return the numbers of the levels of all widths, float32 [8 or 16, 128]: a lane is a width."""
    numbers, structure = layout.quantizer.level_table()
    numbers = numbers.T.copy()
    levels = jax.tree.unflatten(structure, range(len(numbers)))
    if isinstance(levels, QuadraticLevels):
        # The root of 0 is not a number, as x times the inverse of the root of x.
        squares = numbers[levels._fields.index("square")]
        np.maximum(squares, _LEAST_SQUARE, out=squares)
    table = np.zeros((-(-len(numbers) // SUBLANES) * SUBLANES, LANES), np.float32)
    table[: len(numbers), : numbers.shape[1]] = numbers
    return table
