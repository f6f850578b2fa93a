"""Layouts in which a warpgroup of a Mosaic GPU kernel holds rows, and how a kernel is started.

A row of 256 lanes is handled as eight pieces, [rows, groups, words, 4] each, or [rows, 8, 4] if a
piece is one group (an axis of one group defeats the inference of layouts). The four lanes of a word
are neighbors in one thread, and eight threads hold a piece of a row: everything is loaded and
stored in words, and the maximum over 32 lanes takes three shuffles. A warpgroup has 16 rows at a
time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import modes
from pallas_kernels.codec import Index

ROW = PIECES, LANES = 8, 32  # of a row, of a piece
MOST_ROWS = 16  # of a block
_WORD = 4  # lanes of a piece that a thread holds
Shape = tuple[int, ...]  # of a piece
U32 = jnp.uint32


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
            # No program reads what it wrote, except behind a `commit_smem`, which is a barrier.
            unsafe_no_auto_barriers=True,
            # The other semantics infer layouts, which takes minutes.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams() if modes.interpreting() else None,
    )(*arrays)


def cast(values: Array, shape: Shape, dims: tuple[int, ...]) -> Array:
    """Cast values with the axes `dims` of a piece of `shape` to the layout of such pieces."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tiled = _layout(shape).reduce(tuple(d for d in range(len(shape)) if d not in dims))
    layout = plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)
    return plgpu.layout_cast(values, layout)


def spread(values: Array, shape: Shape, dims: tuple[int, ...], rank: int | None = None) -> Array:
    """Repeat values whose axes are `dims` along the other of the first `rank` axes of a piece."""
    rank = len(shape) if rank is None else rank
    if dims == tuple(range(rank)):
        return values
    repeated = lax.broadcast_in_dim(values, shape[:rank], dims)
    return cast(repeated, shape, tuple(range(rank)))


def count(shape: Shape, dims: tuple[int, ...], axis: int) -> Array:
    """Return the index along an axis of a piece, uint32, for values whose axes are `dims`."""
    index = lax.broadcasted_iota(jnp.int32, tuple(shape[d] for d in dims), dims.index(axis))
    return cast(index, shape, dims).astype(U32)


def piece_shape(rows: int, group_size: int) -> Shape:
    """Return the shape of a piece of rows: rows, groups, words of a group, lanes of a word."""
    groups = LANES // group_size
    return (rows, *[groups] * (groups > 1), group_size // _WORD, _WORD)


def rows_of_block(rows: int) -> int:
    """Return the rows of a block, of `rows` in all.

    The last block is moved back to end with the rows, so that some of them are computed twice.
    """
    return next(count for count in (MOST_ROWS, 8, 4, 2, 1) if count <= rows)


def load_rows(shape: Shape, rows_ref, first: Index) -> list[Array]:
    """Load consecutive rows of an array [num_rows, 8, 32] as float32 pieces of `shape`."""
    refs = [rows_ref.at[pl.ds(first, shape[0]), piece] for piece in range(PIECES)]
    pieces = [cast(load(ref, shape), shape, tuple(range(len(shape)))) for ref in refs]
    return [values.astype(jnp.float32) for values in pieces]


def store_rows(rows_ref, first: Index, pieces: Iterable[Array]) -> None:
    """Store pieces as consecutive rows of a float32 array [num_rows, 8, 32]."""
    for piece, values in enumerate(pieces):
        store(rows_ref.at[pl.ds(first, values.shape[0]), piece], values.shape, values)


def load(ref, shape: Shape, column: int | None = None) -> Array:
    """Load an array in a shape, or a column of it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if modes.interpreting():  # it cannot reshape refs
        values = ref[...].reshape(shape)
        return values if column is None else values[:, column]
    ref = ref.reshape(shape)
    return plgpu.load(ref if column is None else ref.at[:, column], optimized=False)


def store(ref, shape: Shape, values: Array, column: int | None = None) -> None:
    """Store what `load` loads."""
    if modes.interpreting():
        if column is not None:
            values = ref[...].reshape(shape).at[:, column].set(values)
        ref[...] = values.reshape(ref.shape)
    else:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        ref = ref.reshape(shape)
        ref = ref if column is None else ref.at[:, column]
        if hasattr(plgpu, "store"):  # in pieces of any size: since JAX 0.12
            plgpu.store(ref, values, optimized=False)
        else:
            ref[...] = values


def _layout(shape: Shape) -> Any:
    """Return the layout of a piece: a row on eight threads, four rows on a warp.

    A thread holds all of the last axis. With fewer than 16 rows, several hold the same values.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import Replicated, TiledLayout, Tiling

    rows, *inner, in_thread = shape
    rank, per_warp = len(shape), min(rows, 4)
    warps = rows // per_warp
    lanes = (-rank, *range(1 - 2 * rank, -rank))
    return TiledLayout(
        Tiling((shape, (per_warp, *[1] * len(inner), in_thread))),
        warp_dims=(-2 * rank,) if warps == 4 else (Replicated(4 // warps), -2 * rank),
        lane_dims=lanes if per_warp == 4 else (Replicated(4 // per_warp), *lanes),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
