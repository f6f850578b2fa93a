"""Rows inside a Triton kernel: gathered, decoded and encoded by the formulas of the codec."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._triton import message
from pallas_kernels._triton.arithmetic import arithmetic, bytes_to_float
from pallas_kernels._triton.blocks import (
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
from pallas_kernels.codec import scales
from pallas_kernels.codec.arithmetic import Index, code_to_float, float_to_code
from pallas_kernels.codec.levels import round_to_level
from pallas_kernels.codec.rounding import half_to_offset, lane_words, row_words

Pieces = Sequence[Array]  # float32 [rows, 32] each


class Noise(NamedTuple):
    """Number of a compression, which its rounding offsets depend on."""

    chunk: Array
    turn: Array
    seed_ref: Any


def partial_sum(block: Block, rows_ref, row: Array, messages_ref, received: int) -> list[Array]:
    """Sum local rows and those of the received messages, which lie one after the other."""
    halves = block.layout.payload_bytes // 2

    def add(index: Index, pieces: Pieces) -> list[Array]:
        return decode(block, messages_ref, index * halves, pieces)

    pieces = gather(rows_ref, row)
    if received <= 1:
        return add(0, pieces) if received else pieces
    return lax.fori_loop(0, received, add, pieces)


def gather(rows_ref, row: Array) -> list[Array]:
    """Load rows of the local array as float32 pieces; `row` is int32 [rows], original indices."""
    return [
        rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]].astype(jnp.float32)
        for piece in range(PIECES)
    ]


def scatter(pieces: Pieces, rows_ref, row: Array) -> None:
    """Store pieces as rows, which inverts `gather`."""
    for piece, values in enumerate(pieces):
        rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]] = values


def decode(block: Block, message_ref, start: Index, onto: Pieces | None = None) -> list[Array]:
    """Decode the block in the message that starts at `start` (16-bit units), added to `onto`."""
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


def encode(block: Block, pieces: Pieces, noise: Noise, message_ref) -> None:
    """Write the block's part of a message."""
    layout, ops = block.layout, arithmetic()
    maxima, row_maxima = [], []
    for values in pieces:
        bits = lax.bitcast_convert_type(jnp.abs(values), jnp.int32)
        row_maxima.append(jnp.max(bits, axis=1))
        maxima.append(_group_maxima(bits, row_maxima[-1], layout.group_size).astype(U32))
    super_bits = scales.quantize_super_scales(functools.reduce(jnp.maximum, row_maxima).astype(U32))
    words = _noise_words(block, noise)
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
    """Split codes into float32 magnitudes and uint32 words of the sign bit, both [rows, 32]."""
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
    """Compute maxima of the groups of a piece, int32 [rows, 32 / group_size]."""
    if group_size == LANES:  # no reshape, which Triton would move through shared memory
        return row_maxima[:, None]
    return jnp.max(bits.reshape(-1, LANES // group_size, group_size), axis=2)


def _noise_words(block: Block, noise: Noise) -> list[Array] | None:
    """Compute words of rounding offsets; None if offsets are constant.

    Pieces 0 to 3 are in the low halves and 4 to 7 in the high ones.
    """
    rounding = block.layout.quantizer.rounding
    if rounding == "nearest":
        return None
    ids = (noise.chunk * block.layout.rows_per_chunk + block.place).astype(U32)
    rows = row_words(ids, noise.turn, noise.seed_ref, rounding)[:, None]
    lanes = [(iota(LANES) + LANES * piece).astype(U32)[None, :] for piece in range(PIECES // 2)]
    return [lane_words(rows, lane, noise.turn, rounding) for lane in lanes]
