"""Rows inside a Triton kernel: gathered, decoded, encoded, by the formulas of the codec."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec import scales
from dynamiq_jax.codec.arithmetic import code_to_float, float_to_code
from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.levels import round_to_level
from dynamiq_jax.codec.rounding import half_to_offset, offset_words, row_words
from pallas_kernels import triton_message as message
from pallas_kernels.triton_arithmetic import arithmetic, bytes_to_float
from pallas_kernels.triton_blocks import (
    LANES,
    PIECES,
    U32,
    Block,
    in_every_byte,
    iota,
    merge_lanes,
    split_lanes,
    to_lanes,
)

Pieces = Sequence[Array]  # float32 [rows, 32] each


def partial_sum(block: Block, rows_ref, row: Array, messages_ref, received: int) -> list[Array]:
    """Local rows plus those of the received messages, which lie one after the other."""
    halves = block.layout.payload_bytes // 2

    def add(index: Array | int, pieces: Pieces) -> list[Array]:
        return decode(block, messages_ref, index * halves, pieces)

    pieces = gather(rows_ref, row)
    if received <= 1:
        return add(0, pieces) if received else pieces
    return lax.fori_loop(0, received, add, pieces)


def gather(rows_ref, row: Array) -> list[Array]:
    """Rows of the local array, float32 pieces. `row` is int32 [rows], original indices."""
    return [
        rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]].astype(jnp.float32)
        for piece in range(PIECES)
    ]


def scatter(pieces: Pieces, rows_ref, row: Array) -> None:
    """Inverse of `gather`."""
    for piece, values in enumerate(pieces):
        rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]] = values


def decode(
    block: Block, message_ref, start: Array | int, onto: Pieces | None = None
) -> list[Array]:
    """The block's values in the message that starts at `start` (16-bit units), added to `onto`."""
    ops = arithmetic()
    low, high = message.unpack(block, message_ref, start)
    super_bits = message_ref[start + block.layout.super_scales_start // 2 + block.place]
    pieces = []
    for piece in range(PIECES):
        scale = scales.reconstruct_scales(
            message.load_group_bytes(block, message_ref, start, piece), super_bits
        )
        value, sign = _magnitude_and_sign(block, low[piece], high[piece] if high else None)
        position = lax.bitcast_convert_type(block.levels.position(value, ops), U32)
        signed = lax.bitcast_convert_type(position ^ sign, jnp.float32)
        scale = to_lanes(scale)
        pieces.append(
            signed * scale if onto is None else ops.multiply_add(signed, scale, onto[piece])
        )
    return pieces


def encode(block: Block, pieces: Pieces, chunk: Array, turn: Array, seed_ref, message_ref) -> None:
    """Writes the block's part of a message."""
    layout, ops = block.layout, arithmetic()
    maxima, row_maxima = [], []
    for values in pieces:
        bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
        row_maxima.append(jnp.max(bits, axis=1))
        maxima.append(_group_maxima(bits, row_maxima[-1], layout.group_size).astype(U32))
    super_bits = scales.quantize_super_scales(functools.reduce(jnp.maximum, row_maxima).astype(U32))
    ids = (chunk * layout.rows_per_chunk + block.place).astype(U32)
    nearest = layout.rounding == "nearest"
    words = (
        None
        if nearest
        else _piece_words(row_words(ids, turn, seed_ref, layout.rounding), turn, layout)
    )
    low, high, group_scales = [], [], []
    for piece, (values, maximum) in enumerate(zip(pieces, maxima, strict=True)):
        group_scale = scales.quantize_group_scales(maximum, super_bits[:, None], ops)
        inverse = scales.reciprocal(scales.scale_of_groups(group_scale, super_bits), ops)
        t = ops.multiply_to_one(jnp.abs(values), to_lanes(inverse))
        offset: Array | np.float32 = np.float32(0.5)
        if words is not None:
            offset = half_to_offset(words[piece % 4] >> np.uint32(16 * (piece // 4)))
        magnitude = round_to_level(t, offset, block.levels, ops)
        sign = lax.bitcast_convert_type(values, U32) >> (np.uint32(32) - block.width.astype(U32))
        code = magnitude | (sign & ~block.top)  # one instruction, with the mask of the magnitude
        if max(block.widths) > 8:
            low.append(merge_lanes(code & np.uint32(0xFF), 4))
            high.append(merge_lanes(code >> np.uint32(8), 4))
        else:
            low.append(merge_lanes(code, 4))
        group_scales.append(float_to_code(group_scale))
    message.store_scales(block, group_scales, super_bits, message_ref)
    message.pack(block, low, high, message_ref)
    message.pad(layout, message_ref)


def _magnitude_and_sign(block: Block, low: Array, high: Array | None) -> tuple[Array, Array]:
    """Magnitude codes float32 [rows, 32], and words uint32 [rows, 32] of the sign bit alone."""
    top, width = block.top, block.width.astype(U32)
    if high is None:
        magnitudes = low & (top * np.uint32(0x01010101))
        value = bytes_to_float(magnitudes[:, :, None], iota(4)[None, None, :]).reshape(-1, LANES)
        signs = (low << (np.uint32(8) - width)) & in_every_byte(0x80)
        lane = (np.uint32(24) - np.uint32(8) * iota(4).astype(U32))[None, None, :]
        sign = (signs[:, :, None] << lane).reshape(-1, LANES) & np.uint32(0x80000000)
    else:
        code = split_lanes(low, 4) & np.uint32(0xFF)
        code = code | ((split_lanes(high, 4) & np.uint32(0xFF)) << np.uint32(8))
        value = code_to_float(code & top)
        sign = (code >> (width - np.uint32(1))) << np.uint32(31)
    return value, sign


def _group_maxima(bits: Array, row_maxima: Array, group_size: int) -> Array:
    """Maxima of the groups of a piece, int32 [rows, 32 / group_size]."""
    if group_size == LANES:  # without the reshape, which Triton would move through shared memory
        return row_maxima[:, None]
    return jnp.max(bits.reshape(-1, LANES // group_size, group_size), axis=2)


def _piece_words(rows: Array, turn: Array, layout: Layout) -> list[Array]:
    """Words of rounding offsets: of pieces 0 to 3 in the low halves, of 4 to 7 in the high."""
    lanes = [(iota(LANES) + LANES * piece).astype(U32) for piece in range(PIECES // 2)]
    return [offset_words(rows, lane, turn, layout.rounding) for lane in lanes]
