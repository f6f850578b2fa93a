"""A block of rows inside a Mosaic GPU kernel, read from a message and written to one.

A row is handled as eight pieces, see `launch`: in every plane of a message the lanes of a piece are
32 neighboring bytes at one shift. Every width class has code of its own, in which the numbers that
depend on the width are constants. The formulas are those of `pallas_kernels.codec`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, implementation
from pallas_kernels._mosaic_gpu.launch import (
    LANES,
    PIECES,
    blocks_of_rows,
    cast,
    launch,
    load_rows,
    row_shape,
    side_by_side,
    spread,
)
from pallas_kernels.codec import scales
from pallas_kernels.codec.arithmetic import PLAIN, WHOLE, Arithmetic, code_to_float, float_to_code
from pallas_kernels.codec.layout import Layout, WidthClass
from pallas_kernels.codec.levels import Levels, num_levels, round_to_level
from pallas_kernels.codec.packing import planes, row_bytes
from pallas_kernels.codec.rounding import half_to_offset, lane_words, row_words

Pieces = Sequence[Array]  # float32 [rows, groups, lanes of a group] each
Fields = dict[tuple[int, int], list]  # bytes of the parts of every plane, by first bit and bits

_U32 = jnp.uint32


class Received(NamedTuple):
    """Part of a block in a message."""

    fields: Fields  # uint8
    group_bytes: list[Array]  # uint8, of every piece
    step: Array  # float32, what a group's byte is multiplied by


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one width class that a program handles."""

    layout: Layout
    rows_class: WidthClass
    rows: int
    first: Array  # int32, within the class
    staged: Any  # ref to rows in shared memory
    barrier: Any  # ref

    @property
    def levels(self) -> Levels:
        """Levels of the width."""
        return self.layout.quantizer.levels(self.rows_class.width)

    @property
    def place(self) -> Array:
        """Place of the first row within the chunk, int32."""
        return self.first + self.rows_class.first_row

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a piece."""
        return self.rows, *row_shape(self.layout.group_size)[1:]

    @property
    def lanes(self) -> tuple[int, ...]:
        """Axes of a piece."""
        return tuple(range(len(self.shape)))

    @property
    def groups(self) -> tuple[int, ...]:
        """Axes of what a group has one of; only that of rows if a piece is one group."""
        return self.lanes[:-1]

    def plane(self, low: int, bits: int) -> Array:
        """Return the byte of the message where the block's part of a plane starts."""
        start = self.rows_class.codes_start + self.rows_class.rows * row_bytes(low)
        return start + self.first * row_bytes(bits)

    @property
    def group_scales(self) -> Array:
        """Byte of the message where the block's group scales start."""
        return self.layout.group_scales_start + self.place * self.layout.groups

    @property
    def super_scales(self) -> Array:
        """Byte of the message where the block's super-scales start."""
        return self.layout.super_scales_start + self.place * 2

    def cast(self, values: Array, dims: tuple[int, ...]) -> Array:
        """Cast values to the layout of a piece; see `launch.cast`."""
        return cast(values, self.shape, dims)

    def spread(self, values: Array, dims: tuple[int, ...], rank: int | None = None) -> Array:
        """Repeat values along the axes of a piece; see `launch.spread`."""
        return spread(values, self.shape, dims, rank)

    def count(self, dims: tuple[int, ...], axis: int) -> Array:
        """Return the index along an axis of a piece, uint32, for values whose axes are `dims`."""
        shape = tuple(self.shape[d] for d in dims)
        index = lax.broadcasted_iota(jnp.int32, shape, dims.index(axis))
        return self.cast(index, dims).astype(_U32)


def for_each_block(
    kernel: Callable,
    layout: Layout,
    operands: Sequence[Array | int],
    out_shape: jax.ShapeDtypeStruct,
    *,
    staged: Any,
    chunks: int = 1,
) -> Array:
    """Run `kernel(block, *operand refs, out ref)` for the blocks of one or more chunks.

    The axis "chunk" of the grid counts chunks. Rows of type `staged` are gathered or scattered.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    classes = [(c, *blocks_of_rows(c.rows)) for c in layout.classes]
    counts = sorted({rows for _, rows, _ in classes}, reverse=True)

    def body(*all_refs):
        *refs, staged_ref, barriers = all_refs
        program, before = lax.axis_index("block"), 0
        for c, rows, blocks in classes:

            @pl.when((program >= before) & (program < before + blocks))
            def _(c: WidthClass = c, rows: int = rows, before: int = before) -> None:
                first = lax.min((program - before) * rows, jnp.int32(c.rows - rows))
                barrier = barriers[counts.index(rows)]
                kernel(Block(layout, c, rows, first, staged_ref, barrier), *refs)

            before += blocks

    scratch = [
        plgpu.SMEM((counts[0], *row_shape(layout.group_size)), staged),
        [plgpu.Barrier(num_arrivals=count) for count in counts],
    ]
    grid = (sum(blocks for *_, blocks in classes), chunks)
    return launch(body, grid, operands, out_shape, scratch)


def partial_sum(block: Block, rows_ref, row_of: Callable, messages: Sequence[Any]) -> list[Array]:
    """Sum rows `row_of(0), row_of(1)`, ... of [num_rows, *row_shape] and received messages."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # All indices first: the compiler does not move their loads past a copy.
    for row, index in enumerate([row_of(row) for row in range(block.rows)]):
        plgpu.copy_gmem_to_smem(rows_ref.at[index], block.staged.at[row], block.barrier)
    received = [receive(block, message_ref) for message_ref in messages]  # while the rows travel
    plgpu.barrier_wait(block.barrier)
    pieces = load_rows(block.shape, block.staged, 0)
    for part in received:
        pieces = [a + b for a, b in zip(pieces, decode(block, part), strict=True)]
    return pieces


def scatter(block: Block, pieces: Iterable[Array], rows_ref, row_of: Callable) -> None:
    """Store pieces as the rows `row_of(0), row_of(1)`, ... of an array [num_rows, *row_shape]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    indices = [row_of(row) for row in range(block.rows)]
    for piece, values in enumerate(pieces):
        compat.mosaic_gpu_store(block.staged.at[pl.ds(0, block.rows), piece], values)
    plgpu.commit_smem()
    for row, index in enumerate(indices):
        plgpu.copy_smem_to_gmem(block.staged.at[row], rows_ref.at[index])
    plgpu.wait_smem_to_gmem(0)


def receive(block: Block, message_ref) -> Received:
    """Load the block's part of a message."""
    step = scales.scale_step(_load_super_bits(block, message_ref))
    return Received(
        fields={
            (low, bits): [
                _load(block, message_ref, block.plane(low, bits), (bits,), part, block.lanes)
                for part in range(bits)
            ]
            for low, bits in _planes(block.rows_class.width)
        },
        group_bytes=[
            _load(block, message_ref, block.group_scales, (PIECES,), piece, block.groups)
            for piece in range(PIECES)
        ],
        step=block.spread(step, (0,), rank=len(block.groups)),
    )


def decode(block: Block, received: Received) -> Iterator[Array]:
    """Decode the block in a message, one piece after the other."""
    width = block.rows_class.width
    for piece, group_byte in enumerate(received.group_bytes):
        scale = group_byte.astype(jnp.int32).astype(jnp.float32) * received.step
        scale = block.spread(scale, block.groups)
        if not width:  # NaN has to surface
            yield scale * np.float32(0)
            continue
        code = _code_of_fields(received.fields, piece)
        position = block.levels.position(code_to_float(code & np.uint32(num_levels(width))))
        sign = (code >> np.uint32(width - 1)) << np.uint32(31)
        signed = lax.bitcast_convert_type(position, _U32) ^ sign
        yield lax.bitcast_convert_type(signed, jnp.float32) * scale


def encode(block: Block, pieces: Pieces, chunk: Array, turn: Array, seed_ref, message_ref) -> None:
    """Write the block's part of a message."""
    width, ops = block.rows_class.width, _arithmetic()
    maxima = [_largest(block, jnp.abs(values)) for values in pieces]
    row_maxima = functools.reduce(jnp.maximum, maxima)
    if len(block.groups) > 1:
        row_maxima = block.cast(jnp.max(row_maxima, axis=1), (0,))
    super_bits = scales.quantize_super_scales(row_maxima.astype(_U32))
    super_of_groups = block.spread(super_bits, (0,), rank=len(block.groups))
    step = scales.scale_step(super_of_groups)
    fields: Fields = {plane: [None] * plane[1] for plane in _planes(width)}
    group_bytes = list(maxima)
    for piece, offset in _offsets(block, chunk, turn, seed_ref):
        values, maximum = pieces[piece], maxima[piece].astype(_U32)
        group_scale = scales.quantize_group_scales(maximum, super_of_groups, ops)
        group_bytes[piece] = float_to_code(group_scale)
        if width:
            inverse = block.spread(scales.reciprocal(group_scale * step), block.groups)
            t = ops.multiply_to_one(jnp.abs(values), inverse)
            magnitude = round_to_level(t, offset, block.levels, ops)
            sign = lax.bitcast_convert_type(values, _U32) >> np.uint32(31)
            _add_to_fields(fields, piece, magnitude | (sign << np.uint32(width - 1)))
    for (low, bits), parts in fields.items():
        for part, words in enumerate(parts):
            _store(block, message_ref, block.plane(low, bits), (bits,), part, words)
    _store_scales(block, group_bytes, super_bits, message_ref)
    _pad(block.layout, message_ref)


def _largest(block: Block, magnitudes: Array) -> Array:
    """Compute the largest magnitude of every group, as bits, int32: NaN is on top."""
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32)
    return block.cast(jnp.max(bits, axis=len(block.groups)), block.groups)


def _offsets(
    block: Block, chunk: Array, turn: Array, seed_ref
) -> Iterator[tuple[int, Array | np.float32]]:
    """Yield pieces and their rounding offsets; pieces that share a word follow one another."""
    layout, rounding = block.layout, block.layout.quantizer.rounding
    if rounding == "nearest":
        yield from [(piece, np.float32(0.5)) for piece in range(PIECES)]
        return
    ids = (chunk * layout.rows_per_chunk + block.place).astype(_U32) + block.count((0,), 0)
    rows = block.spread(row_words(ids, turn, seed_ref, rounding), (0,))
    lanes = block.count(block.lanes, block.lanes[-1])
    if len(block.groups) > 1:
        lanes = block.count(block.lanes, 1) * np.uint32(layout.group_size) + lanes
    for piece in range(PIECES // 2):
        words = lane_words(rows, lanes + np.uint32(LANES * piece), turn, rounding)
        yield piece, half_to_offset(words)
        yield piece + PIECES // 2, half_to_offset(words >> np.uint32(16))


def _planes(width: int) -> list[tuple[int, int]]:
    """Return the first bit and the number of bits of every plane."""
    bits = planes(width)
    return [(sum(bits[:index]), count) for index, count in enumerate(bits)]


def _code_of_fields(fields: Fields, piece: int) -> Array:
    codes = [
        ((parts[piece % bits].astype(_U32) >> np.uint32(piece // bits * bits)) & _mask(bits))
        << np.uint32(low)
        for (low, bits), parts in fields.items()
    ]
    return functools.reduce(operator.or_, codes)


def _add_to_fields(fields: Fields, piece: int, code: Array) -> None:
    for (low, bits), parts in fields.items():
        field = ((code >> np.uint32(low)) & _mask(bits)) << np.uint32(piece // bits * bits)
        part = parts[piece % bits]
        parts[piece % bits] = field if part is None else part | field


def _mask(bits: int) -> np.uint32:
    return np.uint32(2**bits - 1)


# Below: memory. Refs are reshaped, which the interpreter cannot do.


def _load(
    block: Block, ref, start: Array, inner: tuple[int, ...], index: int, dims: tuple[int, ...]
) -> Array:
    """Load bytes [:, index] of the array [rows, *inner, ...] at byte `start` of a message."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, *rest = (block.shape[d] for d in dims)
    shape = (rows, *inner, *rest)
    flat = ref.at[pl.ds(start, int(np.prod(shape)))]
    if implementation.interpreting():
        return flat[...].reshape(shape)[:, index]
    return block.cast(plgpu.load(flat.reshape(shape).at[:, index], optimized=False), dims)


def _store(
    block: Block, ref, start: Array, inner: tuple[int, ...], index: int, values: Array
) -> None:
    """Store the low bytes of uint32 values at the places that `_load` loads."""
    rows, *rest = values.shape
    shape = (rows, *inner, *rest)
    flat, values = ref.at[pl.ds(start, int(np.prod(shape)))], values.astype(jnp.uint8)
    if implementation.interpreting():
        flat[...] = flat[...].reshape(shape).at[:, index].set(values).reshape(-1)
    else:
        compat.mosaic_gpu_store(flat.reshape(shape).at[:, index], values)


def _store_scales(block: Block, group_bytes: list[Array], super_bits: Array, message_ref) -> None:
    # A single byte of a single row could not be stored: JAX takes it for a scalar.
    if len(block.groups) == 1:
        columns = side_by_side(group_bytes, block.shape)
        _store(block, message_ref, block.group_scales, (1,), 0, columns)
    else:
        for piece, values in enumerate(group_bytes):
            _store(block, message_ref, block.group_scales, (PIECES,), piece, values)
    columns = side_by_side([super_bits, super_bits >> np.uint32(8)], block.shape)
    _store(block, message_ref, block.super_scales, (1,), 0, columns)


def _load_super_bits(block: Block, message_ref) -> Array:
    low, high = (
        _load(block, message_ref, block.super_scales, (2,), byte, (0,)).astype(_U32)
        for byte in range(2)
    )
    return low | (high << np.uint32(8))


def _pad(layout: Layout, message_ref) -> None:
    if layout.padding_start < layout.payload_bytes:

        @pl.when(lax.axis_index("block") == 0)
        def _() -> None:
            for byte in range(layout.padding_start, layout.payload_bytes):
                message_ref[byte] = jnp.uint8(0)


def _arithmetic() -> Arithmetic:
    """Return operations for Mosaic, which lacks plain roundings and contracts multiply-adds."""
    return PLAIN._replace(ceil=_ceil, nearest_whole=_nearest_whole)


def _ceil(values: Array) -> Array:
    whole, _ = _nearest_whole(values)
    return jnp.where(whole < values, whole + np.float32(1), whole)


def _nearest_whole(values: Array) -> tuple[Array, Array]:
    if implementation.interpreting():  # XLA cancels the other form
        return PLAIN.nearest_whole(values)
    whole = values + WHOLE
    return whole - WHOLE, lax.bitcast_convert_type(whole, _U32)
