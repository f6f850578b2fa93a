"""Rows inside a Triton kernel: gathered, decoded and encoded by the formulas of the codec."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import message
from pallas_kernels._triton.arithmetic import (
    arithmetic,
    bytes_to_float,
    halves_to_offsets,
    magnitude_bits,
    offset_unit,
    select_bits,
    signs_to_halves,
    to_float32,
)
from pallas_kernels._triton.blocks import (
    LANES,
    PIECES,
    U32,
    Block,
    iota,
    merge_bytes,
    merge_tops,
    split_lanes,
    to_lanes,
)
from pallas_kernels.codec import Index, scales
from pallas_kernels.codec.arithmetic import WHOLE, code_to_float
from pallas_kernels.codec.levels import level_bits, scale_gaps
from pallas_kernels.codec.rounding import lane_words, row_words

Pieces = Sequence[Array]  # float32 [rows, 32] each

_SIGN_ON_TOP = (*range(1, 8), 0)  # bits of a code, in the order of those of a byte


def add_messages(block: Block, pieces: Pieces, messages_ref, received: int) -> list[Array]:
    """Add the rows of one or more received messages, which lie one after the other."""
    halves = block.layout.payload_bytes // 2

    def add(index: Index, pieces: Pieces) -> list[Array]:
        return decode(block, messages_ref, index * halves, pieces)

    return add(0, pieces) if received == 1 else lax.fori_loop(0, received, add, list(pieces))


def gather(rows_ref, row: Array) -> list[Array]:
    """Load rows of the local array as float32 pieces; `row` is int32 [rows], original indices."""
    return [
        to_float32(rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]])
        for piece in range(PIECES)
    ]


def scatter(pieces: Pieces, rows_ref, row: Array) -> None:
    """Store pieces as rows, which inverts `gather`."""
    for piece, values in enumerate(pieces):
        rows_ref[row[:, None], (iota(LANES) + LANES * piece)[None, :]] = values


def decode(block: Block, message_ref, start: Index, onto: Pieces | None = None) -> list[Array]:
    """Decode the block in the message that starts at `start` (16-bit units), added to `onto`."""
    ops = arithmetic()
    super_bits = message_ref[start + block.layout.super_scales_start // 2 + block.place]

    def add(piece: int, value: Array, sign: Array) -> Array:
        group_bytes = message.load_group_bytes(block, message_ref, start, piece)
        scale = to_lanes(scales.reconstruct_scales(group_bytes, super_bits))
        position = lax.bitcast_convert_type(block.levels.position(value, ops), U32)
        signed = lax.bitcast_convert_type(position ^ (sign & np.uint32(1 << 31)), jnp.float32)
        return signed * scale if onto is None else ops.multiply_add(signed, scale, onto[piece])

    def narrow() -> list[Array]:
        words = message.load_codes(block, message_ref, start, _SIGN_ON_TOP)
        return [add(piece, *_of_bytes(word)) for piece, word in enumerate(words)]

    def wide() -> list[Array]:
        bytes_ = (range(8), range(8, 16))
        low, high = (message.load_codes(block, message_ref, start, bits) for bits in bytes_)
        codes = [_two_bytes(*words) for words in zip(low, high, strict=True)]
        return [
            add(piece, code_to_float(code >> np.uint32(1)), code << np.uint32(31))
            for piece, code in enumerate(codes)
        ]

    # Nearly all widths are narrow, and a byte costs less.
    return lax.cond(block.width > 8, wide, narrow)


def encode(block: Block, pieces: Pieces, turn: Array, seed_ref, message_ref) -> None:
    """Write the block's part of a message."""
    layout, ops = block.layout, arithmetic()
    maxima, row_maxima = [], []
    for values in pieces:
        bits = magnitude_bits(values)
        row_maxima.append(jnp.max(bits, axis=1))
        maxima.append(_group_maxima(bits, row_maxima[-1], layout.group_size).astype(U32))
    super_bits = scales.quantize_super_scales(functools.reduce(jnp.maximum, row_maxima).astype(U32))
    # A byte of each lane, whose top bit is the sign.
    tops = [merge_tops(lax.bitcast_convert_type(values, U32)) for values in pieces]
    words = _noise_words(block, turn, seed_ref, tops)
    levels = scale_gaps(block.levels, np.float32(1) if words is None else offset_unit())
    magnitudes, group_scales = [], []
    for piece, (values, maximum) in enumerate(zip(pieces, maxima, strict=True)):
        group_scale, bits = scales.quantize_group_scales(maximum, super_bits[:, None], ops)
        inverse = scales.inverse_of_groups(group_scale, super_bits, ops)
        t = ops.multiply_to_one(jnp.abs(values), to_lanes(inverse))
        offset: Array | np.float32 = np.float32(0.5)
        if words is not None:
            offset = halves_to_offsets(words[piece % 4], piece // 4, block.place[:, None])
        magnitudes.append(level_bits(t, offset, levels, ops))
        group_scales.append(bits)
    message.store_scales(block, group_scales, super_bits, message_ref)

    @pl.when(block.width <= 8)
    def _() -> None:
        of_bytes = zip(tops, (merge_bytes(magnitude, 4) for magnitude in magnitudes), strict=True)
        codes = [select_bits(np.uint32(0x80808080), *word) for word in of_bytes]
        message.store_codes(block, codes, _SIGN_ON_TOP, message_ref)

    @pl.when(block.width > 8)
    def _() -> None:
        codes = [_codes(*of_piece) for of_piece in zip(magnitudes, tops, strict=True)]
        for low in (0, 8):
            parts = [merge_bytes(code >> np.uint32(low), 4) for code in codes]
            message.store_codes(block, parts, range(low, low + 8), message_ref)


def _of_bytes(words: Array) -> tuple[Array, Array]:
    """Split bytes of sign and magnitude, in words [rows, 8]: see `bytes_to_float`, [rows, 32]."""
    value, sign = bytes_to_float(words[:, :, None], iota(4)[None, None, :])
    return value.reshape(-1, LANES), sign.reshape(-1, LANES)


def _codes(magnitudes: Array, tops: Array) -> Array:
    """Join magnitudes with the bits of `WHOLE`, [rows, 32], and signs, words [rows, 8]: codes."""
    signs = (split_lanes(tops, 4) >> np.uint32(7)) & np.uint32(1)
    return ((magnitudes - WHOLE.view(np.uint32)) << np.uint32(1)) | signs


def _two_bytes(low: Array, high: Array) -> Array:
    """Join the bytes of codes, in words [rows, 8], to codes uint32 [rows, 32]."""
    low, high = (split_lanes(words, 4) & np.uint32(0xFF) for words in (low, high))
    return low | (high << np.uint32(8))


def _group_maxima(bits: Array, row_maxima: Array, group_size: int) -> Array:
    """Compute maxima of the groups of a piece, int32 [rows, 32 / group_size]."""
    if group_size == LANES:  # no reshape, which Triton would move through shared memory
        return row_maxima[:, None]
    return jnp.max(bits.reshape(-1, LANES // group_size, group_size), axis=2)


def _noise_words(block: Block, turn: Array, seed_ref, tops: list[Array]) -> list[Array] | None:
    """Compute words of rounding offsets; None if offsets are constant.

    Pieces 0 to 3 are in the low halves and 4 to 7 in the high ones. All bits of the offset of a
    negative value are flipped, which mirrors it: see `codec.encode_rows`. Signs are in `tops`.
    """
    rounding = block.layout.quantizer.rounding
    if rounding == "nearest":
        return None
    ids = (block.chunk * block.layout.rows_per_chunk + block.place).astype(U32)
    rows = row_words(ids, turn, seed_ref, rounding)[:, None]
    lanes = [(iota(LANES) + LANES * piece).astype(U32)[None, :] for piece in range(PIECES // 2)]
    words = [lane_words(rows, lane, turn, rounding) for lane in lanes]
    index = iota(4)[None, None, :]
    signs = [
        signs_to_halves(low[:, :, None], high[:, :, None], index).reshape(-1, LANES)
        for low, high in zip(tops[: PIECES // 2], tops[PIECES // 2 :], strict=True)
    ]
    return [word ^ of_word for word, of_word in zip(words, signs, strict=True)]
