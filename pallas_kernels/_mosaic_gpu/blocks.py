"""The rows of one program of a Mosaic GPU kernel.

A block is some consecutive places of a chunk. Its rows may differ in width, so the numbers that
depend on it are read from a table for every row. There is code for blocks of up to 8 bits, which
nearly all are, and for wider ones.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._mosaic_gpu.launch import (
    ROW,
    U32,
    cast,
    count,
    launch,
    piece_shape,
    rows_of_block,
    spread,
)
from pallas_kernels.codec import MAX_WIDTH, Index, Layout, Places
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.levels import Levels


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive places of a chunk that a program handles."""

    layout: Layout
    bits: int  # of codes: 8, or 16 where a row has more than 8
    rows: int
    chunk: Array  # int32
    first: Array  # int32
    places: Places  # refs
    starts: list[Array]  # of the first `bits` planes, in units of 32 bytes, int32
    widest: Array  # width of the first row, int32
    narrowest: Array  # width of the last row, int32
    table: Any  # ref to the levels of all widths
    staged: Any  # ref to rows in shared memory
    planes: Any  # ref to planes in shared memory
    barrier: Any  # ref
    levels: Any = None  # of every row, float32 [rows]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a piece."""
        return piece_shape(self.rows, self.layout.group_size)

    @property
    def lanes(self) -> tuple[int, ...]:
        """Axes of a piece."""
        return tuple(range(len(self.shape)))

    @property
    def words(self) -> tuple[int, ...]:
        """Axes of what a thread has one of."""
        return self.lanes[:-1]

    @property
    def groups(self) -> tuple[int, ...]:
        """Axes of what a group has one of; only that of rows if a piece is one group."""
        return self.lanes[:-2]

    @property
    def halves(self) -> tuple[int, ...]:
        """Shape of words in units of 16 bits."""
        return *self.shape[:-1], 2

    @property
    def units(self) -> list[Array]:
        """Units of the message where the block's parts of the planes start."""
        return [start + self.first for start in self.starts]

    def plane_rows(self, bit: Index) -> Array:
        """Return the number of places of the chunk that have a bit, int32."""
        starts = self.places.starts
        return starts[self.chunk, bit + 1] - starts[self.chunk, bit]

    def indices(self) -> list[Array]:
        """Load the original rows of all places."""
        return [self.places.order[self.chunk, self.first + row] for row in range(self.rows)]

    def cast(self, values: Array, dims: tuple[int, ...]) -> Array:
        """Cast values to the layout of a piece; see `launch.cast`."""
        return cast(values, self.shape, dims)

    def spread(self, values: Array, dims: tuple[int, ...], rank: int | None = None) -> Array:
        """Repeat values along the axes of a piece; see `launch.spread`."""
        return spread(values, self.shape, dims, rank)

    def count(self, dims: tuple[int, ...], axis: int) -> Array:
        """Return the index along an axis of a piece, uint32, for values whose axes are `dims`."""
        return count(self.shape, dims, axis)

    def merge(self, parts: Array, dims: tuple[int, ...] | None = None) -> Array:
        """Merge the last axis of unsigned integers into words, whose axes are `dims`."""
        dims = self.words if dims is None else dims
        shifted = parts.astype(U32) << self._shifts(parts.shape[-1], dims)
        return self.cast(jnp.sum(shifted, axis=len(dims), dtype=U32), dims)

    def split(self, words: Array, parts: int, dims: tuple[int, ...] | None = None) -> Array:
        """Invert `merge`, except for the bits above."""
        dims = self.words if dims is None else dims
        repeated = lax.broadcast_in_dim(words, (*words.shape, parts), range(len(dims)))
        in_thread = cast(repeated, (*self.shape[:-1], parts), (*dims, len(self.words)))
        return in_thread >> self._shifts(parts, dims)

    def _shifts(self, parts: int, dims: tuple[int, ...]) -> Array:
        last = len(self.words)
        index = count((*self.shape[:-1], parts), (*dims, last), last)
        return index * np.uint32(32 // parts)


def for_each_block(
    kernel: Callable,
    layout: Layout,
    operands: Sequence[Any],
    out_shape: jax.ShapeDtypeStruct,
    *,
    staged: Any,
    chunks: int = 1,
) -> Array:
    """Run `kernel(block, *operand refs, out ref)` for the blocks of one or more chunks.

    The first operands, which the kernel finds in its block, are the first chunk and the arrays of
    `Places`. Rows of type `staged` are gathered or scattered.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # Rows of a block that lack a plane read what follows it, which must be in the message.
    after_planes = layout.payload_bytes - layout.group_scales_start
    rows = rows_of_block(min(layout.rows_per_chunk, after_planes // UNIT + 1))
    grid = -(-layout.rows_per_chunk // rows), chunks
    sizes = [bits for bits in (8, MAX_WIDTH) if bits - 8 < max(layout.allocation.widths)]
    numbers, structure = layout.quantizer.level_table()

    def body(table, first_chunk, order, widths, starts, *refs):
        *others, staged, planes, barrier = refs
        chunk = first_chunk[0] + lax.axis_index("chunk")
        first = lax.min(lax.axis_index("block") * rows, jnp.int32(layout.rows_per_chunk - rows))
        widest, narrowest = widths[chunk, first], widths[chunk, first + (rows - 1)]

        for bits in sizes:

            @pl.when((widest > 8) == (bits > 8))
            def _(bits: int = bits) -> None:
                block = Block(
                    layout=layout,
                    bits=bits,
                    rows=rows,
                    chunk=chunk,
                    first=first,
                    places=Places(order, widths, starts),
                    starts=[starts[chunk, bit] for bit in range(bits)],
                    widest=widest,
                    narrowest=narrowest,
                    table=table,
                    staged=staged,
                    planes=planes,
                    barrier=barrier,
                )
                kernel(dataclasses.replace(block, levels=_levels(block, structure)), *others)

    *words, _ = piece_shape(rows, layout.group_size)
    scratch = [
        plgpu.SMEM((rows, *ROW), staged),
        plgpu.SMEM((sizes[-1], *words, 2), jnp.uint16),
        plgpu.Barrier(num_arrivals=rows),
    ]
    return launch(body, grid, [numbers.reshape(-1), *operands], out_shape, scratch)


def _levels(block: Block, structure: Any) -> Levels:
    """Read the levels of the rows from the table of all widths."""
    place = block.first + block.count((0,), 0).astype(jnp.int32)

    def of_width(width: Array) -> list[Array]:
        count = structure.num_leaves
        columns = (block.table[width * count + index] for index in range(count))
        return [block.cast(jnp.full(block.rows, column), (0,)) for column in columns]

    def narrow(step: Array, columns: list[Array]) -> list[Array]:
        width = block.widest - 1 - step
        has_less = place >= block.plane_rows(width)
        pairs = zip(of_width(width), columns, strict=True)
        return [jnp.where(has_less, less, column) for less, column in pairs]

    columns = lax.fori_loop(0, block.widest - block.narrowest, narrow, of_width(block.widest))
    return jax.tree.unflatten(structure, columns)
