"""The rows of one program of a Triton kernel, how its threads hold them, and how it is started.

A row of 256 lanes is handled as eight pieces [rows, 32]: a Triton value cannot be sliced, and in
a plane of a message bit i of every byte belongs to a lane of piece i. A thread holds four
neighboring lanes of a piece, 16 bytes of a float32 gradient. Their codes share one 32-bit word,
[rows, 8] for a piece, as do their bits in a plane.

Rows of a program that have one width are handled together, by a body that reads the width and the
numbers that depend on it. Nearly all programs have rows of one width only. So one kernel serves all
allocations.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import modes
from pallas_kernels._triton.arithmetic import join_low, join_top
from pallas_kernels.codec import MAX_WIDTH, Index, Layout
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.levels import Levels

PIECES, LANES = 8, 32  # of a row, of a piece
U32 = jnp.uint32


class LaunchConfig(NamedTuple):
    """Rows of one program, and the warps that share them: powers of two, the same for all shapes.

    16 rows on 4 warps give every thread four lanes of each of the eight pieces of a row: 128 bytes
    of a float32 gradient in flight.
    """

    rows: int = 16
    warps: int = 4


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    config: LaunchConfig,
    operands: Sequence[Any],
    out_shape: Any,
) -> Any:
    """Run `kernel(*refs)` on a grid. All refs are whole arrays in memory, numbers int32 [1]."""
    # A deprecated backend: imported here, so that its removal breaks nothing else.
    from jax.experimental.pallas import triton

    values = (jnp.asarray(operand) for operand in operands)
    arrays = [value if value.ndim else value.astype(jnp.int32).reshape(1) for value in values]
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        interpret=modes.interpreting(),
        compiler_params=triton.CompilerParams(num_warps=config.warps, num_stages=1),
    )(*arrays)


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one width of a program. Scalars are values of the kernel."""

    layout: Layout
    chunk: Index
    place: Array  # int32 [rows], within the chunk; some repeat if there are fewer of this width
    width: Array  # int32
    levels: Levels
    starts_ref: Any  # of planes, see `Places`
    low_starts: list[Array]  # those of the first eight planes, read once

    def plane(self, bit: int) -> Array:
        """Return where the rows lie in a plane: int32 [rows, 16], in 16-bit units of a message."""
        own = (self.place * (UNIT // 2))[:, None] + iota(UNIT // 2)[None, :]
        few = bit < len(self.low_starts)
        start = self.low_starts[bit] if few else self.starts_ref[self.chunk, bit]
        return own + start * (UNIT // 2)


def for_each_block(
    kernel: Callable,
    layout: Layout,
    config: LaunchConfig,
    operands: Sequence[Any],
    out_shape: jax.ShapeDtypeStruct,
    *,
    first: Callable | None = None,
) -> Array:
    """Run `kernel(block, row, *operand refs, out ref)` for the blocks of a chunk, or of all chunks.

    The first operands, which the kernel finds in its block, are the chunk, or None for all, and the
    arrays of `Places`. `row` are the original rows at the places of a block, int32 [rows]. The
    first program calls `first` before, with the units that planes take and the refs.
    """
    of_chunk, order, widths, starts, *others = operands
    numbers, structure = layout.quantizer.level_table()

    def ends(index: Array) -> tuple[Array, Array]:
        """Return the first and the last place of a program."""
        first_place = index * config.rows
        most = jnp.int32(layout.rows_per_chunk - 1)
        return first_place, lax.min(first_place + (config.rows - 1), most)

    def body(chunk_ref, order_ref, widths_ref, starts_ref, levels_ref, *refs):
        index = pl.program_id(0)
        chunk = pl.program_id(1) if of_chunk is None else chunk_ref[0]
        # Now the compiler knows that no index overflows, and adds constants to addresses.
        chunk = chunk & np.int32(2**20 - 1)
        if first is not None:
            pl.when(index == 0)(lambda: first(starts_ref[chunk, MAX_WIDTH], *refs))

        widest, narrowest = (widths_ref[chunk, place] for place in ends(index))

        def places_of(width: Array) -> tuple[Array, Array]:
            """Return the first and the last place of the program that has a width."""

            def rows_in_plane(bit: Array) -> Array:
                return starts_ref[chunk, bit + 1] - starts_ref[chunk, bit]

            # Rows in plane `width` are wider, and those that are not in the plane before narrower.
            most, (first_place, last) = jnp.int32(MAX_WIDTH - 1), ends(index)
            wider = jnp.where(width > most, 0, rows_in_plane(lax.min(width, most)))
            enough = rows_in_plane(lax.max(width - 1, 0))
            enough = jnp.where(width > 0, enough, layout.rows_per_chunk)
            return lax.max(first_place, wider), lax.min(last, enough - 1)

        def handle(width: Array, _: None) -> None:
            # In nearly all programs. Without `width`, the compiler would make two loops.
            all_alike = (width == narrowest) & (width == widest)
            start, stop = lax.cond(all_alike, lambda: ends(index), lambda: places_of(width))

            @pl.when(start <= stop)
            def _handle() -> None:
                columns = [levels_ref[width, i] for i in range(numbers.shape[1])]
                place = lax.min(start + iota(config.rows), stop)
                block = Block(
                    layout=layout,
                    chunk=chunk,
                    place=place,
                    width=width,
                    levels=jax.tree.unflatten(structure, columns),
                    starts_ref=starts_ref,
                    low_starts=[starts_ref[chunk, bit] for bit in range(8)],
                )
                kernel(block, order_ref[chunk, place], *refs)

        lax.fori_loop(narrowest, widest + 1, handle, None)

    # The last program may overhang.
    programs = pl.cdiv(layout.rows_per_chunk, config.rows)
    grid = (programs, layout.num_chunks if of_chunk is None else 1)
    tables = [0 if of_chunk is None else of_chunk, order, widths, starts, numbers]
    return launch(body, grid, config, [*tables, *others], out_shape)


def to_lanes(by_group: Array) -> Array:
    """Reshape numbers of groups [rows, 32 / group_size] to broadcast to [rows, 32]."""
    groups = by_group.shape[1]
    if groups == 1:
        return by_group
    spread = jnp.broadcast_to(by_group[:, :, None], (*by_group.shape, LANES // groups))
    return spread.reshape(-1, LANES)


def merge_bytes(values: Array, count: int) -> Array:
    """Merge the low bytes of 2 or 4 neighbors of uint32 [rows, m] into one word."""
    bits = 8
    while count > 1:
        values = merge_pairs(values, functools.partial(join_low, bits=bits))
        bits, count = 2 * bits, count // 2
    return values


def merge_tops(values: Array) -> Array:
    """Merge the top bytes of 4 neighbors of uint32 [rows, m] into one word."""
    return merge_pairs(merge_pairs(values, join_top), functools.partial(join_low, bits=16))


def merge_pairs(values: Array, join: Callable[[Array, Array], Array]) -> Array:
    """Join neighbors of [rows, m]."""
    pairs = values.reshape(values.shape[0], -1, 2)
    first, second = (part[:, :, 0] for part in jnp.split(pairs, 2, axis=2))
    return join(first, second)


def merge_halves(values: Array) -> Array:
    """Merge neighbors of uint32 [rows, m] into one word."""
    shifts = (iota(2) * 16).astype(U32)
    parts = values.reshape(values.shape[0], -1, 2) << shifts[None, None, :]
    return jnp.sum(parts, axis=2, dtype=U32)


def split_lanes(words: Array, count: int, bits: int | None = None) -> Array:
    """Split words into neighbors, except for the bits above: uint32 [rows, m * count]."""
    shifts = (iota(count) * (bits or 32 // count)).astype(U32)
    return (words[:, :, None] >> shifts[None, None, :]).reshape(words.shape[0], -1)


def iota(count: int) -> Array:
    """Return int32 0 .. count - 1."""
    return lax.iota(jnp.int32, count)
