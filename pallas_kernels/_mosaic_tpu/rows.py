"""Values of a block to codes and back, by the formulas of `pallas_kernels.codec`.

The values of a block are in memory in the order of their coordinates, [256, 128]. They are loaded
as 32 registers: sublane q of register 4 i + a is coordinate 32 i + 4 q + a, whose code takes bit i
of byte a of word q of a plane.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import modes
from pallas_kernels._mosaic_tpu import message
from pallas_kernels._mosaic_tpu.blocks import Block
from pallas_kernels._mosaic_tpu.vectors import (
    EIGHTHS,
    I32,
    QUARTERS,
    SUBLANES,
    U32,
    VECTOR,
    VECTORS,
    as_float,
    bits_of,
    iota,
    over_segments,
)
from pallas_kernels.codec import Layout, scales
from pallas_kernels.codec.arithmetic import PLAIN, Arithmetic, code_to_float, nearest_whole
from pallas_kernels.codec.bit_planes import UNIT, transpose
from pallas_kernels.codec.levels import level_bits
from pallas_kernels.codec.rounding import half_to_offset, lane_words, row_words


def vector_of(index: int) -> Any:
    """Return where register `index` of the values lies."""
    eighth, quarter = divmod(index, QUARTERS)
    return pl.ds(UNIT * eighth + quarter, SUBLANES, QUARTERS)


def add_decoded(
    block: Block, of_rows: message.Scales, planes_ref, values_ref, sums_ref=None
) -> None:
    """Decode a block to `values_ref`, added to `sums_ref` if there is one.

    `message.load_planes` has loaded its planes.
    """
    planes = [
        jnp.where(block.widths > bit, planes_ref[bit], np.uint32(0))
        for bit in range(planes_ref.shape[0])
    ]
    of_bytes = [transpose(planes[low : low + 8]) for low in range(0, len(planes), 8)]
    step = scales.scale_step(of_rows.super_bits)
    for eighth in range(EIGHTHS):
        scale = code_to_float(of_rows.groups[eighth]) * step
        for quarter in range(QUARTERS):
            code = _byte(of_bytes[0][eighth], quarter)
            if len(of_bytes) > 1:
                code = code | (_byte(of_bytes[1][eighth], quarter) << np.uint32(8))
            position = block.levels.position(code_to_float(code >> np.uint32(1)))
            signed = as_float(bits_of(position) | (code << np.uint32(31)))
            value, at = signed * scale, vector_of(QUARTERS * eighth + quarter)
            values_ref[at, :] = value if sums_ref is None else sums_ref[at, :] + value


def encode(
    block: Block, values_ref, turn: Array, seed: tuple[Array, Array], planes_ref, message_ref
) -> None:
    """Write the scales of a block to a message, and its planes to `planes_ref`."""
    layout, ops = block.layout, _arithmetic()
    groups, super_bits = quantize_scales(layout, values_ref)
    step = scales.scale_step(super_bits)
    inverses = [scales.reciprocal(group * step, ops) for group in groups]
    message.merge_scales(block, as_scales(groups, super_bits), message_ref)
    ids = (block.chunk * layout.rows_per_chunk + block.places).astype(U32)
    hashes = row_words(ids, turn, seed, layout.quantizer.rounding)
    bits = planes_ref.shape[0]
    codes = [[jnp.zeros(VECTOR, U32)] * EIGHTHS for _ in range(0, bits, 8)]
    for vector in range(VECTORS // 2):
        eighth, quarter = divmod(vector, QUARTERS)
        noise = _noise_words(block, hashes, eighth, quarter, turn)
        for half, low in enumerate((eighth, eighth + EIGHTHS // 2)):
            values = values_ref[vector_of(QUARTERS * low + quarter), :]
            code = _codes(block, values, inverses[low], noise, half, ops)
            for byte, of_byte in enumerate(codes):
                part = code >> np.uint32(8 * byte) if byte else code
                if bits > 8:
                    part = part & np.uint32(0xFF)
                of_byte[low] = of_byte[low] | (part << np.uint32(8 * quarter))
    for byte, of_byte in enumerate(codes):
        for bit, plane in enumerate(transpose(of_byte)):
            planes_ref[8 * byte + bit] = plane
    # The sign of a row without bits.
    planes_ref[0] = jnp.where(block.widths > 0, planes_ref[0], np.uint32(0))


def as_scales(groups: list[Array], super_bits: Array) -> message.Scales:
    """Convert what `quantize_scales` returns to integers."""
    return message.Scales([group.astype(I32).astype(U32) for group in groups], super_bits)


def quantize_scales(layout: Layout, values_ref) -> tuple[list[Array], Array]:
    """Return the group scales of every eighth, float32, and the super-scales."""
    maxima = [_group_maxima(values_ref, eighth, layout.group_size) for eighth in range(EIGHTHS)]
    row_maxima = over_segments(functools.reduce(jnp.maximum, maxima), SUBLANES)
    super_bits = scales.quantize_super_scales(row_maxima.astype(U32))
    ops = _arithmetic()
    groups = [
        scales.quantize_group_scales(maximum.astype(U32), super_bits, ops)[0] for maximum in maxima
    ]
    return groups, super_bits


def _codes(
    block: Block, values: Array, inverse: Array, noise: Array | None, half: int, ops: Arithmetic
) -> Array:
    bits = bits_of(values)
    t = ops.multiply_to_one(as_float(bits & np.uint32(0x7FFFFFFF)), inverse)
    offset: Array | np.float32 = np.float32(0.5)
    if noise is not None:
        # All bits of a negative value: they mirror an offset, see `codec.encode_rows`.
        signs = (lax.bitcast_convert_type(bits, I32) >> 31).astype(U32)
        mirrored = noise ^ signs
        offset = half_to_offset(mirrored >> np.uint32(16) if half else mirrored)
    magnitude = level_bits(t, offset, block.levels, ops) & block.top
    return (magnitude << np.uint32(1)) | (bits >> np.uint32(31))


def _noise_words(
    block: Block, hashes: Array, eighth: int, quarter: int, turn: Array
) -> Array | None:
    """Return words of rounding offsets of two registers; None if offsets are constant."""
    rounding = block.layout.quantizer.rounding
    if rounding == "nearest":
        return None
    lanes = (QUARTERS * iota(0) + (SUBLANES * QUARTERS * eighth + quarter)).astype(U32)
    return lane_words(hashes, lanes, turn, rounding)


def _group_maxima(values_ref, eighth: int, group_size: int) -> Array:
    """Compute the bits of the largest magnitudes, int32, repeated in the sublanes of a group."""
    vectors = range(QUARTERS * eighth, QUARTERS * (eighth + 1))
    bits = [
        lax.bitcast_convert_type(values_ref[vector_of(index), :], I32) & np.int32(0x7FFFFFFF)
        for index in vectors
    ]
    return over_segments(functools.reduce(jnp.maximum, bits), group_size // QUARTERS)


def _byte(word: Array, index: int) -> Array:
    shifted = word >> np.uint32(8 * index) if index else word
    return shifted & np.uint32(0xFF) if index < 3 else shifted


def _arithmetic() -> Arithmetic:
    """Return operations for a TPU, whose plain root has checks that no level needs."""
    if modes.interpreting():  # XLA cancels the other rounding
        return PLAIN
    return PLAIN._replace(nearest_whole=nearest_whole, sqrt=lambda x: x * lax.rsqrt(x))
