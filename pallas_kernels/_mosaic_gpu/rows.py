"""Rows inside a Mosaic GPU kernel, from memory to a message and back.

A row is handled as eight pieces, see `launch`. Each bit of a byte of a plane belongs to another
piece: eight planes become the codes of eight pieces when the bits of their words are transposed.
The formulas are those of `pallas_kernels.codec`.
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import modes
from pallas_kernels._mosaic_gpu import message
from pallas_kernels._mosaic_gpu.blocks import Block
from pallas_kernels._mosaic_gpu.launch import LANES, PIECES, U32, load_rows, store_rows
from pallas_kernels.codec import scales
from pallas_kernels.codec.arithmetic import (
    PLAIN,
    WHOLE,
    Arithmetic,
    code_to_float,
    float_to_code,
    nearest_whole,
)
from pallas_kernels.codec.bit_planes import transpose
from pallas_kernels.codec.levels import Levels, round_to_level, top_code
from pallas_kernels.codec.rounding import half_to_offset, lane_words, row_words

Pieces = Sequence[Array]  # float32, of the shape of a block


def partial_sum(block: Block, rows_ref, messages: Sequence[Any]) -> list[Array]:
    """Sum the block's rows of [num_rows, 8, 32] and received messages."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # All indices first: the compiler does not move their loads past a copy.
    for row, index in enumerate(block.indices()):
        plgpu.copy_gmem_to_smem(rows_ref.at[index], block.staged.at[row], block.barrier)
    # While the rows travel:
    received = [message.receive(block, message_ref) for message_ref in messages]
    plgpu.barrier_wait(block.barrier)
    pieces = load_rows(block.shape, block.staged, 0)
    for part in received:
        pieces = [a + b for a, b in zip(pieces, decode(block, part), strict=True)]
    return pieces


def scatter(block: Block, pieces: Iterable[Array], rows_ref) -> None:
    """Store pieces as the block's rows of an array [num_rows, 8, 32]."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    indices = block.indices()
    store_rows(block.staged, 0, pieces)
    plgpu.commit_smem()
    for row, index in enumerate(indices):
        plgpu.copy_smem_to_gmem(block.staged.at[row], rows_ref.at[index])
    plgpu.wait_smem_to_gmem(0)


def decode(block: Block, received: message.Received) -> Iterator[Array]:
    """Decode the block in a message, one piece after the other."""
    words = [
        transpose([block.merge(plane) for plane in received.planes[low : low + 8]])
        for low in range(0, block.bits, 8)
    ]
    top = top_code(block.levels)
    mask = jnp.where(top == np.uint32(0), top, (top << np.uint32(1)) | np.uint32(1))
    step = block.spread(scales.scale_step(received.super_bits), (0,), rank=len(block.groups))
    levels = _spread_levels(block)
    for piece, group_byte in enumerate(received.group_bytes):
        scale = block.spread(code_to_float(group_byte) * step, block.groups)
        parts = []
        for low, of_byte in zip((0, 8), words, strict=False):
            own = block.spread((mask >> np.uint32(low)) & np.uint32(0xFF), (0,))
            parts.append((block.split(of_byte[piece], 4) & own) << np.uint32(low))
        code = functools.reduce(operator.or_, parts)
        position = levels.position(code_to_float(code >> np.uint32(1)))
        signed = lax.bitcast_convert_type(position, U32) ^ (code << np.uint32(31))
        yield lax.bitcast_convert_type(signed, jnp.float32) * scale


def encode(block: Block, pieces: Pieces, turn: Array, seed_ref, message_ref) -> None:
    """Write the block's part of a message."""
    maxima = [_largest(block, jnp.abs(values)) for values in pieces]
    row_maxima = functools.reduce(jnp.maximum, maxima)
    if len(block.groups) > 1:
        row_maxima = block.cast(jnp.max(row_maxima, axis=1), (0,))
    super_bits = scales.quantize_super_scales(row_maxima.astype(U32))
    super_of_groups = block.spread(super_bits, (0,), rank=len(block.groups))
    step = scales.scale_step(super_of_groups)
    group_scales = [
        scales.quantize_group_scales(maximum.astype(U32), super_of_groups, _arithmetic())[0]
        for maximum in maxima
    ]
    ids = (block.chunk * block.layout.rows_per_chunk + block.first).astype(U32)
    rounding = block.layout.quantizer.rounding
    hashes = row_words(ids + block.count((0,), 0), turn, seed_ref, rounding)

    def encode_pair(first: int) -> list[list[Array]]:
        noise = _noise_words(block, hashes, first, turn)
        return [
            _encode_piece(block, pieces[piece], group_scales[piece] * step, words)
            for piece, words in zip(range(first, PIECES, PIECES // 2), noise, strict=True)
        ]

    def nothing() -> list[list[Array]]:
        words = block.cast(jnp.zeros(block.shape[:-1], U32), block.words)
        return [[words] * (block.bits // 8)] * 2

    # The compiler does not look across branches. It would interleave all of these pairs, which
    # takes twice the registers.
    pairs = [
        lax.cond(block.widest > 0, functools.partial(encode_pair, first), nothing)
        for first in range(PIECES // 2)
    ]
    words = [*(low for low, _ in pairs), *(high for _, high in pairs)]  # of every piece and byte
    planes = [plane for of_byte in zip(*words, strict=True) for plane in transpose(of_byte)]
    message.store_planes(block, planes, message_ref)
    group_bytes = [float_to_code(scale) for scale in group_scales]
    message.store_scales(block, group_bytes, super_bits, message_ref)
    message.clear(block, message_ref)


def _encode_piece(block: Block, values: Array, scale: Array, noise: Array | None) -> list[Array]:
    """Compute codes: words for every byte of them."""
    ops = _arithmetic()
    inverse = block.spread(scales.reciprocal(scale), block.groups)
    t = ops.multiply_to_one(jnp.abs(values), inverse)
    # All bits of a negative value: they mirror an offset, see `codec.encode_rows`.
    signs = (lax.bitcast_convert_type(values, jnp.int32) >> 31).astype(U32)
    offset = np.float32(0.5) if noise is None else half_to_offset(noise ^ signs)
    magnitude = round_to_level(t, offset, _spread_levels(block), ops)
    code = (magnitude << np.uint32(1)) - signs
    return [
        block.merge((code >> np.uint32(low)) & np.uint32(0xFF)) for low in range(0, block.bits, 8)
    ]


def _spread_levels(block: Block) -> Levels:
    return jax.tree.map(lambda column: block.spread(column, (0,)), block.levels)


def _largest(block: Block, magnitudes: Array) -> Array:
    """Compute the largest magnitude of every group, as bits, int32: NaN is on top."""
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32)
    of_words = block.cast(jnp.max(bits, axis=len(block.words)), block.words)
    return block.cast(jnp.max(of_words, axis=len(block.groups)), block.groups)


def _noise_words(
    block: Block, hashes: Array, piece: int, turn: Array
) -> tuple[Array, Array] | tuple[None, None]:
    """Return words of offsets, in the low halves, of a piece and of the one that shares its words.

    None if offsets are constant.
    """
    rounding = block.layout.quantizer.rounding
    if rounding == "nearest":
        return None, None
    strides = [(axis, np.prod(block.shape[axis + 1 :])) for axis in block.lanes[1:]]
    counts = [block.count(block.lanes, axis) * np.uint32(stride) for axis, stride in strides]
    lanes = functools.reduce(operator.add, counts) + np.uint32(LANES * piece)
    words = lane_words(block.spread(hashes, (0,)), lanes, turn, rounding)
    return words, words >> np.uint32(16)


def _arithmetic() -> Arithmetic:
    """Return operations for Mosaic, which lacks plain roundings and contracts multiply-adds."""
    rounded = PLAIN.nearest_whole if modes.interpreting() else nearest_whole

    def ceil(values: Array) -> tuple[Array, Array]:
        whole, _ = rounded(values)
        whole = jnp.where(whole < values, whole + np.float32(1), whole)
        return whole, lax.bitcast_convert_type(whole + WHOLE, U32)

    return PLAIN._replace(ceil=ceil, nearest_whole=rounded)
