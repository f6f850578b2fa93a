"""Layouts in which a warpgroup of a Mosaic GPU kernel holds rows, and how a kernel is started.

A row of 256 lanes is handled as eight pieces, [rows, groups, lanes of a group] each, or [rows, 32]
if a group has 32 lanes (an axis of one group defeats the inference of layouts). Eight threads
hold a piece of a row, four neighboring lanes each, so that everything is loaded and stored in
words, and the maximum over 32 lanes takes three shuffles. A warpgroup has 16 rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, implementation
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE

PIECES, LANES = 8, 32  # of a row, of a piece
MOST_ROWS = 16  # of a block
_VECTOR = 4  # lanes of a thread
Shape = tuple[int, ...]  # of a piece


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    operands: Sequence[Any],
    out_shape: Any,
    scratch: Sequence[Any] = (),
) -> Any:
    """Run `kernel(*refs)` on a grid of blocks, or of blocks and chunks, one warpgroup each.

    Numbers become int32 [1].
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    values = (jnp.asarray(operand) for operand in operands)
    arrays = [value if value.ndim else value.astype(jnp.int32).reshape(1) for value in values]
    return plgpu.kernel(
        kernel,
        out_type=out_shape,
        grid=grid,
        grid_names=("block", "chunk")[: len(grid)],
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            # No program reads what it wrote, except in `scatter`, which has a barrier.
            unsafe_no_auto_barriers=True,
            # The other semantics infer layouts, which takes a minute.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams() if implementation.interpreting() else None,
    )(*arrays)


def cast(values: Array, shape: Shape, dims: tuple[int, ...]) -> Array:
    """Cast values whose axes are `dims` of the axes of pieces of `shape` to the layout of those."""
    return _cast(
        values, _layout(shape).reduce(tuple(d for d in range(len(shape)) if d not in dims))
    )


def spread(values: Array, shape: Shape, dims: tuple[int, ...], rank: int | None = None) -> Array:
    """Repeat values whose axes are `dims` along the other of the first `rank` axes of a piece."""
    rank = len(shape) if rank is None else rank
    if dims == tuple(range(rank)):
        return values
    repeated = lax.broadcast_in_dim(values, shape[:rank], dims)
    return cast(repeated, shape, tuple(range(rank)))


def row_shape(group_size: int) -> Shape:
    """Return the shape of a row of 256: pieces, groups of a piece, lanes of a group."""
    groups = LANES // group_size
    return (PIECES, groups, group_size) if groups > 1 else (PIECES, LANES)


def blocks_of_rows(rows: int) -> tuple[int, int]:
    """Return the rows of a block, and the number of blocks that cover a class of rows.

    The last block is moved back to end with the class, so that some rows are computed twice.
    """
    block = next(count for count in (MOST_ROWS, 8, 4, 2, 1) if count <= rows)
    return block, -(-rows // block)


def load_rows(shape: Shape, rows_ref, first: Index) -> list[Array]:
    """Load consecutive rows of an array [num_rows, *row_shape] as float32 pieces of `shape`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    refs = [rows_ref.at[pl.ds(first, shape[0]), piece] for piece in range(PIECES)]
    loaded = [
        cast(plgpu.load(ref, optimized=False), shape, tuple(range(len(shape)))) for ref in refs
    ]
    return [values.astype(jnp.float32) for values in loaded]


def store_rows(rows_ref, first: Array, pieces: Sequence[Array]) -> None:
    """Store pieces as consecutive rows of a float32 array."""
    for piece, values in enumerate(pieces):
        compat.mosaic_gpu_store(rows_ref.at[pl.ds(first, values.shape[0]), piece], values)


def store_column(ref, first: Array, values: Array) -> None:
    """Store one value for each row."""
    compat.mosaic_gpu_store(ref.at[pl.ds(first, values.shape[0])], values)


def side_by_side(columns: Sequence[Array], shape: Shape) -> Array:
    """Join values [rows] for pieces of `shape` as columns [rows, count] of all threads of a row."""
    from jax.experimental.mosaic.gpu.fragmented_array import Replicated, TiledLayout, Tiling

    count = len(columns)
    one = _layout(shape).reduce(tuple(range(1, len(shape))))

    def twice(dims):
        return tuple(dim if isinstance(dim, Replicated) else 2 * dim for dim in dims)

    both = TiledLayout(
        Tiling(tuple((*tile, count) for tile in one.tiling.tiles)),
        warp_dims=twice(one.warp_dims),
        lane_dims=twice(one.lane_dims),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    table = (shape[0], count)
    index = _cast(lax.broadcasted_iota(jnp.int32, table, 1), both)
    first, *others = (_cast(lax.broadcast_in_dim(c, table, (0,)), both) for c in columns)
    for column, values in enumerate(others, start=1):
        first = jnp.where(index == np.int32(column), values, first)
    return first


def _cast(values: Array, tiled: Any) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)
    return plgpu.layout_cast(values, layout)


def _layout(shape: Shape) -> Any:
    """Return the layout of a piece: a row on eight threads, four rows on a warp.

    With fewer than 16 rows, several warps or threads hold the same values.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import Replicated, TiledLayout, Tiling

    rows, *inner = shape
    rank, per_warp = len(shape), min(rows, 4)
    warps = rows // per_warp
    lanes = (-rank, *range(1 - 2 * rank, -rank))
    return TiledLayout(
        Tiling((shape, (per_warp, *[1] * (len(inner) - 1), _VECTOR))),
        warp_dims=(-2 * rank,) if warps == 4 else (Replicated(4 // warps), -2 * rank),
        lane_dims=lanes if per_warp == 4 else (Replicated(4 // per_warp), *lanes),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()


assert PIECES * LANES == SUPER_GROUP_SIZE
