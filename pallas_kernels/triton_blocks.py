"""A block of rows inside a Triton kernel: reading it from a message, and writing it to one.

A row of 256 lanes is handled as eight pieces [rows, 32], because a Triton value cannot be sliced
and in every plane of a message the lanes of a piece are 32 neighbouring bytes at one shift. A
thread holds four neighbouring lanes of a piece, 16 bytes of a float32 gradient. Codes of four lanes
lie in one 32-bit word, [rows, 8] for a piece, and are cut from planes and merged into them four at
a time.

One body serves rows of all widths: what depends on the width is read from a table by the class of
the block, and planes that the width lacks are skipped. The arithmetic is `dynamiq_jax.codec`'s.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from dynamiq_jax.codec import scales
from dynamiq_jax.codec.arithmetic import code_to_float, float_to_code
from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.levels import Levels, make_levels, round_to_level, top_code
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE, planes
from dynamiq_jax.codec.rounding import half_to_offset, offset_words, row_words
from pallas_kernels.triton_arithmetic import arithmetic, bytes_to_float
from pallas_kernels.triton_launch import Config, launch

PIECES, LANES = 8, 32  # of a row, of a piece
_CLASS_FIELDS = 5
Pieces = Sequence[Array]  # float32 [rows, 32] each

_U32 = jnp.uint32


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows of one program, all of one width. Scalars are values of the kernel."""

    layout: Layout
    width: Array  # int32
    top: Array  # uint32, the largest magnitude code
    levels: Levels
    class_rows: Array  # int32
    codes_start: Array  # int32, in 16-bit units of the message
    row: Array  # int32 [rows], within the class; the last row repeats where the block overhangs
    place: Array  # int32 [rows], within the chunk

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Widths that a block of this layout can have."""
        return tuple(c.width for c in self.layout.classes)

    def when(self, bits: int, then: Callable, otherwise: Callable, operand: list) -> list:
        """`then(operand)` if the width has that plane of 4, 2 or 1 bits."""
        having = [bits in planes(width) for width in self.widths]
        if all(having):
            return then(operand)
        return (
            lax.cond((self.width & bits) != 0, then, otherwise, operand) if any(having) else operand
        )

    def plane(self, low: Array | int, bits: int, part: int) -> Array:
        """Where the bytes of slice `part` of a plane are, in 16-bit units: int32 [rows, 16]."""
        start = self.codes_start + 16 * self.class_rows * low
        return (start + self.row * (16 * bits) + 16 * part)[:, None] + _iota(16)[None, :]


def for_each_block(
    kernel: Callable,
    layout: Layout,
    config: Config,
    operands: Sequence[Array],
    out_shape: jax.ShapeDtypeStruct,
    chunks: int = 1,
) -> Array:
    """Runs `kernel(block, *operand refs, out ref)` for the blocks of a chunk, or of several chunks,
    counted by the second axis of the grid.
    """
    classes, levels = _tables(layout, config)

    def body(classes_ref, levels_ref, *refs):
        kernel(_locate(layout, config, classes_ref, levels_ref), *refs)

    blocks = sum(config.programs(c.rows) for c in layout.classes)
    tables = [jnp.asarray(classes), jnp.asarray(levels)]
    return launch(body, (blocks, chunks), config, [*tables, *operands], out_shape)


def halves(payloads: Array) -> Array:
    """Messages, uint8 [..., bytes], in 16-bit units: no copy."""
    return lax.bitcast_convert_type(payloads.reshape(-1, 2), jnp.uint16)


def as_bytes(message: Array) -> Array:
    """Inverse of `halves`, of one message."""
    return lax.bitcast_convert_type(message, jnp.uint8).reshape(-1)


def partial_sum(block: Block, rows_ref, row: Array, messages_ref, received: int) -> list[Array]:
    """Local rows plus those of the received messages, which lie one after the other."""
    pieces = gather(rows_ref, row)
    for index in range(received):
        pieces = decode(block, messages_ref, index * (block.layout.payload_bytes // 2), pieces)
    return pieces


def gather(rows_ref, row: Array) -> list[Array]:
    """Rows of the local array, float32 pieces. `row` is int32 [rows], original indices."""
    return [
        rows_ref[row[:, None], (_iota(LANES) + LANES * piece)[None, :]].astype(jnp.float32)
        for piece in range(PIECES)
    ]


def scatter(pieces: Pieces, rows_ref, row: Array) -> None:
    """Inverse of `gather`."""
    for piece, values in enumerate(pieces):
        rows_ref[row[:, None], (_iota(LANES) + LANES * piece)[None, :]] = values


def decode(
    block: Block, message_ref, start: Array | int, onto: Pieces | None = None
) -> list[Array]:
    """The block's values in the message that starts at `start` (16-bit units), added to `onto`."""
    ops = arithmetic()
    low, high = _unpack(block, message_ref, start)
    super_bits = message_ref[start + block.layout.super_scales_start // 2 + block.place]
    pieces = []
    for piece in range(PIECES):
        scale = scales.reconstruct_scales(
            _load_group_bytes(block, message_ref, start, piece), super_bits
        )
        value, sign = _magnitude_and_sign(block, low[piece], high[piece] if high else None)
        position = lax.bitcast_convert_type(block.levels.position(value, ops), _U32)
        signed = lax.bitcast_convert_type(position ^ sign, jnp.float32)
        scale = _to_lanes(scale)
        pieces.append(
            signed * scale if onto is None else ops.multiply_add(signed, scale, onto[piece])
        )
    return pieces


def encode(block: Block, pieces: Pieces, chunk: Array, hop: Array, seed_ref, message_ref) -> None:
    """Writes the block's part of a message."""
    layout, ops = block.layout, arithmetic()
    maxima, row_maxima = [], []
    for values in pieces:
        bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
        row_maxima.append(jnp.max(bits, axis=1))
        maxima.append(_group_maxima(bits, row_maxima[-1], layout.group_size).astype(_U32))
    super_bits = scales.quantize_super_scales(
        functools.reduce(jnp.maximum, row_maxima).astype(_U32)
    )
    ids = (chunk * layout.rows_per_chunk + block.place).astype(_U32)
    nearest = layout.rounding == "nearest"
    words = (
        None
        if nearest
        else _piece_words(row_words(ids, hop, seed_ref, layout.rounding), hop, layout)
    )
    low, high, group_scales = [], [], []
    for piece, (values, maximum) in enumerate(zip(pieces, maxima, strict=True)):
        group_scale = scales.quantize_group_scales(maximum, super_bits[:, None], ops)
        inverse = scales.reciprocal(scales.scale_of_groups(group_scale, super_bits), ops)
        t = ops.multiply_to_one(jnp.abs(values), _to_lanes(inverse))
        offset: Array | np.float32 = np.float32(0.5)
        if words is not None:
            offset = half_to_offset(words[piece % 4] >> np.uint32(16 * (piece // 4)))
        magnitude = round_to_level(t, offset, block.levels, ops)
        sign = lax.bitcast_convert_type(values, _U32) >> (np.uint32(32) - block.width.astype(_U32))
        code = magnitude | (sign & ~block.top)  # one instruction, with the mask of the magnitude
        if max(block.widths) > 8:
            low.append(_merge_lanes(code & np.uint32(0xFF), 4))
            high.append(_merge_lanes(code >> np.uint32(8), 4))
        else:
            low.append(_merge_lanes(code, 4))
        group_scales.append(float_to_code(group_scale))
    _store_scales(block, group_scales, super_bits, message_ref)
    _pack(block, low, high, message_ref)
    _pad(layout, message_ref)


# Below: planes, words and lanes. Messages are read and written in units of 16 bits, the largest
# that every section of a message is a multiple of.


def _tables(layout: Layout, config: Config) -> tuple[np.ndarray, np.ndarray]:
    classes, levels, block = [], [], 0
    for c in layout.classes:
        classes.append([c.width, c.first_row, c.rows, c.codes_start // 32, block])
        numbers = make_levels(c.width, layout.spacing, layout.gap_ratio)
        levels.append(jax.tree.leaves(numbers))
        block += config.programs(c.rows)
    return np.array(classes, np.int32).reshape(-1), np.array(levels, np.float32).reshape(-1)


def _locate(layout: Layout, config: Config, classes_ref, levels_ref) -> Block:
    program, index, first_block = pl.program_id(0), jnp.int32(0), 0
    for c in layout.classes[:-1]:
        first_block += config.programs(c.rows)
        index = index + (program >= first_block).astype(jnp.int32)
    width, first_row, rows, codes_start, first = (
        classes_ref[index * _CLASS_FIELDS + i] for i in range(_CLASS_FIELDS)
    )
    names, structure = jax.tree.flatten(make_levels(2, layout.spacing, layout.gap_ratio))
    numbers = [levels_ref[index * len(names) + i] for i in range(len(names))]
    levels = jax.tree.unflatten(structure, numbers)
    row = lax.min((program - first) * config.rows + _iota(config.rows), rows - 1)
    return Block(
        layout=layout,
        width=width,
        top=top_code(levels),
        levels=levels,
        class_rows=rows,
        codes_start=codes_start * 16,
        row=row,
        place=first_row + row,
    )


def _unpack(block: Block, message_ref, start: Array | int) -> tuple[list[Array], list[Array]]:
    """Words [rows, 8] of the low and, where there are widths over 8, the high bytes of codes."""

    def load(low: Array | int, bits: int, part: int) -> Array:
        units = message_ref[start + block.plane(low, bits, part)].astype(_U32)
        return _merge_lanes(units, 2)

    zero = [jnp.zeros((block.row.shape[0], 8), _U32) for _ in range(PIECES)]
    whole, rest = block.width >> 3, block.width & 7  # planes of 8 bits; the other bits
    words = zero
    for bits in (4, 2, 1):
        low = rest & (8 - 2 * bits)  # bits of the larger planes before it

        def add(words: list, bits: int = bits, low: Array = low) -> list:
            for part in range(bits):
                word = load(8 * whole + low, bits, part)
                for lane in range(8 // bits):
                    field = (word >> np.uint32(bits * lane)) & _in_every_byte(2**bits - 1)
                    piece = part + bits * lane
                    words[piece] = words[piece] | (field << low.astype(_U32))
            return words

        words = block.when(bits, lambda words, add=add: add(list(words)), list, words)
    if max(block.widths) < 8:
        return words, []

    def bytes_at(low: int) -> Callable:
        return lambda _: [load(low, 8, part) for part in range(PIECES)]

    first = lax.cond(whole >= 1, bytes_at(0), list, words)
    if max(block.widths) == 8:
        return first, []
    high = lax.cond(whole >= 1, list, lambda _: list(zero), words)
    if 16 in block.widths:
        high = lax.cond(whole >= 2, bytes_at(8), list, high)
    return first, high


def _pack(block: Block, low: list[Array], high: list[Array], message_ref) -> None:
    """Inverse of `_unpack`."""

    def store(at: Array | int, bits: int, part: int, word: Array) -> None:
        message_ref[block.plane(at, bits, part)] = _split_lanes(word, 2).astype(jnp.uint16)

    whole, rest = block.width >> 3, block.width & 7
    words = [jnp.where(whole >= 1, h, w) for w, h in zip(low, high, strict=True)] if high else low
    for bits in (4, 2, 1):
        if not any(bits in planes(width) for width in block.widths):
            continue
        at = rest & (8 - 2 * bits)

        @pl.when((rest & bits) != 0)
        def _(bits: int = bits, at: Array = at) -> None:
            for part in range(bits):
                fields = [
                    ((words[part + bits * lane] >> at.astype(_U32)) & _in_every_byte(2**bits - 1))
                    << np.uint32(bits * lane)
                    for lane in range(8 // bits)
                ]
                store(8 * whole + at, bits, part, functools.reduce(operator.or_, fields))

    for index, wide in enumerate((low, high)):
        if any(width >= 8 * (index + 1) for width in block.widths):

            @pl.when(whole >= index + 1)
            def _(index: int = index, wide: list[Array] = wide) -> None:
                for part in range(PIECES):
                    store(8 * index, 8, part, wide[part])


def _magnitude_and_sign(block: Block, low: Array, high: Array | None) -> tuple[Array, Array]:
    """Magnitude codes float32 [rows, 32], and words uint32 [rows, 32] of the sign bit alone."""
    top, width = block.top, block.width.astype(_U32)
    if high is None:
        magnitudes = low & (top * np.uint32(0x01010101))
        value = bytes_to_float(magnitudes[:, :, None], _iota(4)[None, None, :]).reshape(-1, LANES)
        signs = (low << (np.uint32(8) - width)) & _in_every_byte(0x80)
        lane = (np.uint32(24) - np.uint32(8) * _iota(4).astype(_U32))[None, None, :]
        sign = (signs[:, :, None] << lane).reshape(-1, LANES) & np.uint32(0x80000000)
    else:
        code = _split_lanes(low, 4) & np.uint32(0xFF)
        code = code | ((_split_lanes(high, 4) & np.uint32(0xFF)) << np.uint32(8))
        value = code_to_float(code & top)
        sign = (code >> (width - np.uint32(1))) << np.uint32(31)
    return value, sign


def _group_maxima(bits: Array, row_maxima: Array, group_size: int) -> Array:
    """Maxima of the groups of a piece, int32 [rows, 32 / group_size]."""
    if group_size == LANES:  # without the reshape, which Triton would move through shared memory
        return row_maxima[:, None]
    return jnp.max(bits.reshape(-1, LANES // group_size, group_size), axis=2)


def _piece_words(rows: Array, hop: Array, layout: Layout) -> list[Array]:
    """Words of rounding offsets: of pieces 0 to 3 in the low halves, of 4 to 7 in the high."""
    lanes = [(_iota(LANES) + LANES * piece).astype(_U32) for piece in range(PIECES // 2)]
    return [offset_words(rows, lane, hop, layout.rounding) for lane in lanes]


def _load_group_bytes(block: Block, message_ref, start: Array | int, piece: int) -> Array:
    """Group scales of a piece: uint32 [rows, 32 / group_size] below 256."""
    count = LANES // block.layout.group_size
    base = start + block.layout.group_scales_start // 2 + block.place * (count * PIECES // 2)
    if count == 1:
        unit = message_ref[base + piece // 2].astype(_U32)
        return ((unit >> np.uint32(8 * (piece % 2))) & np.uint32(0xFF))[:, None]
    units = message_ref[(base + count // 2 * piece)[:, None] + _iota(count // 2)[None, :]]
    return _split_lanes(units.astype(_U32), 2, bits=8) & np.uint32(0xFF)


def _store_scales(block: Block, group_scales: list[Array], super_bits: Array, message_ref) -> None:
    """Stores group scales, uint32 [rows, 32 / group_size] of every piece, and super-scales."""
    count = LANES // block.layout.group_size
    groups = block.layout.group_scales_start // 2 + block.place * (count * PIECES // 2)
    supers = block.layout.super_scales_start // 2 + block.place
    if count == 1:
        columns = [
            first | (second << np.uint32(8))
            for first, second in zip(group_scales[::2], group_scales[1::2], strict=True)
        ]
    else:
        columns = [_merge_lanes(values, 2, bits=8) for values in group_scales]
    if columns[0].shape[1] > 1:
        for piece, units in enumerate(columns):
            at = (groups + count // 2 * piece)[:, None] + _iota(count // 2)[None, :]
            message_ref[at] = units.astype(jnp.uint16)
        message_ref[supers] = super_bits.astype(jnp.uint16)
        return
    # One store for all: the columns of a tile, of which the last are all the super-scale.
    column = _iota(2 * len(columns))[None, :]
    units, at = super_bits[:, None], supers[:, None]
    for index, values in enumerate(columns):
        units = jnp.where(column == index, values, units)
        at = jnp.where(column == index, (groups + index)[:, None], at)
    message_ref[at] = units.astype(jnp.uint16)


def _pad(layout: Layout, message_ref) -> None:
    used = layout.super_scales_start + 2 * layout.rows_per_chunk
    if used < layout.payload_bytes:

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            # Some zeros are stored twice: a shape has to be a power of two.
            at = lax.min(used // 2 + _iota(8), jnp.int32(layout.payload_bytes // 2 - 1))
            message_ref[at] = jnp.zeros((8,), jnp.uint16)


def _to_lanes(by_group: Array) -> Array:
    """Numbers of groups, [rows, 32 / group_size], to something that broadcasts to [rows, 32]."""
    groups = by_group.shape[1]
    if groups == 1:
        return by_group
    spread = jnp.broadcast_to(by_group[:, :, None], (*by_group.shape, LANES // groups))
    return spread.reshape(-1, LANES)


def _merge_lanes(values: Array, count: int, bits: int | None = None) -> Array:
    """Merges `count` neighbours of uint32 [rows, m] into one word."""
    shifts = (_iota(count) * (bits or 32 // count)).astype(_U32)
    parts = values.reshape(values.shape[0], -1, count) << shifts[None, None, :]
    return jnp.sum(parts, axis=2, dtype=_U32)


def _split_lanes(words: Array, count: int, bits: int | None = None) -> Array:
    """Inverse of `_merge_lanes`, but for the bits above: uint32 [rows, m * count]."""
    shifts = (_iota(count) * (bits or 32 // count)).astype(_U32)
    return (words[:, :, None] >> shifts[None, None, :]).reshape(words.shape[0], -1)


def _in_every_byte(value: int) -> np.uint32:
    return np.uint32(value * 0x01010101)


def _iota(count: int) -> Array:
    return lax.iota(jnp.int32, count)


assert PIECES * LANES == SUPER_GROUP_SIZE
