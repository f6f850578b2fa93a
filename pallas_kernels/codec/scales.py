"""Hierarchical scales: a byte for each group under a bfloat16 for each super-group.

Both are rounded up, and coordinates are normalized by the scale that the decoder reconstructs. So
every value is in range, and the estimate stays unbiased without a second random draw (paper,
section 4). Nothing has an absolute epsilon: gradients of 1e-30 survive.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.shapes import Float32, Shaped, UInt8, UInt16, UInt32
from pallas_kernels.codec.arithmetic import PLAIN, Arithmetic

NAN_BITS = np.uint32(0x7FC0)  # bfloat16 NaN
LARGEST_BITS = np.uint32(0x7E800000)  # 2^126 as float32: the reciprocal of more is subnormal
# The bfloat16 before. That of 2^126 itself is subnormal where hardware is off by one unit.
_LARGEST_SUPER_SCALE = np.uint32(0x7E7F0000)


def group_maxima(rows: Float32[Array, "rows 256"], group_size: int) -> UInt32[Array, "rows groups"]:
    """Compute the bits of max |x| of each group.

    Magnitudes are compared as integers, whose order is the same and has NaN on top: float
    reductions of XLA:CPU and of Triton drop NaN.
    """
    bits = lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)
    # In two steps, of two types so that XLA does not merge them: the first vectorizes, a reduction
    # over 32 neighbors does not.
    quarters = jnp.max(bits.reshape(rows.shape[0], -1, 4, group_size // 4), axis=2)
    return jnp.max(quarters.astype(jnp.uint32), axis=-1)


def quantize_super_scales(maxima: Array) -> Array:
    """Round row maxima up to super-scales: bits of float32 to bits of bfloat16, uint32, any shape.

    A row that holds NaN, Inf or a magnitude above 8.47e37, which no integer code can carry, gets a
    NaN: all of its coordinates decode to that.
    """
    rounded_up = (maxima + np.uint32(0xFFFF)) >> np.uint32(16)
    return jnp.where(maxima <= _LARGEST_SUPER_SCALE, rounded_up, NAN_BITS)


def quantize_group_scales(
    maxima: Array, super_bits: Array, ops: Arithmetic = PLAIN
) -> tuple[Array, Array]:
    """Round group maxima, bits of float32 in uint32, up to group scales.

    Super-scales are bits of bfloat16 in uint32, of a shape that broadcasts.

    Returns:
      Whole numbers from 0 to 255, float32, and the bits of those + `arithmetic.WHOLE`.
    """
    inverse = reciprocal(bfloat16_value(super_bits), ops)
    share = ops.multiply_to_one(lax.bitcast_convert_type(maxima, jnp.float32), inverse)
    return ops.ceil(share * np.float32(255))


def quantize_scales(
    maxima: UInt32[Array, "rows groups"],
) -> tuple[UInt8[Array, "rows groups"], UInt16[Array, "rows"]]:
    """Round group maxima, bits of float32, to group scales and super-scales, bits of bfloat16."""
    super_bits = quantize_super_scales(jnp.max(maxima, axis=-1))
    group_scales, _ = quantize_group_scales(maxima, super_bits[:, None])
    return group_scales.astype(jnp.int32).astype(jnp.uint8), super_bits.astype(jnp.uint16)


def row_energies(
    group_bytes: UInt8[Array, "*rows groups"], super_bits: UInt16[Array, "*rows"]
) -> UInt16[Array, "*rows"]:
    """Compute a logarithm of the sum of squared scales of rows.

    The squared error of a row is proportional to that sum. The result, an integer, is the same on
    all hardware.

    Returns:
      Numbers below 2^15, 32 steps an octave; 0 for a row that decodes to NaN anyway.
    """
    squared = jnp.square(group_bytes.astype(jnp.int32))
    squares = jnp.sum(squared, axis=-1, dtype=jnp.int32)
    return energies_of(squares, super_bits.astype(jnp.uint32)).astype(jnp.uint16)


def energies_of(squares: Array, super_bits: Array) -> Array:
    """Compute `row_energies` from sums of squared group scales, int32, and super-scales, uint32."""
    # The sums are below 2^24: exact. The upper half of the bits of a float is a logarithm, if
    # linear within each octave.
    log_squares = lax.bitcast_convert_type(squares.astype(jnp.float32), jnp.uint32) >> np.uint32(16)
    energies = (np.uint32(2) * super_bits + log_squares) >> np.uint32(2)
    return jnp.where(super_bits == NAN_BITS, np.uint32(0), energies)


def reconstruct_scales(
    group_bytes: Shaped[Array, "rows groups"], super_bits: Shaped[Array, "rows"]
) -> Float32[Array, "rows groups"]:
    """Compute the scales that both ends use from integers of any type."""
    group_scales = group_bytes.astype(jnp.int32).astype(jnp.float32)
    return group_scales * scale_step(super_bits.astype(jnp.uint32))[:, None]


def scale_step(super_bits: Array) -> Array:
    """Return the scale of a group whose byte is 1: bits of bfloat16 in uint32 to float32."""
    # Multiplied before the group scale, as XLA would choose anyway: a step below the smallest
    # normal is flushed, so rows whose largest magnitude is below 2^-118 decode to zeros.
    return bfloat16_value(super_bits) * np.float32(1 / 255)


def inverse_of_groups(group_scales: Array, super_bits: Array, ops: Arithmetic = PLAIN) -> Array:
    """Compute `reciprocal` of the scales of groups, with one check a row instead of one a group.

    A group scale is 0 where all magnitudes are below 2^-140 of the row's: any factor that keeps
    them far below a level gives the same codes.
    """
    step = scale_step(super_bits)
    step = jnp.where(step < np.finfo(np.float32).tiny, np.float32(np.inf), step)
    return ops.reciprocal(jnp.maximum(group_scales, np.float32(1)) * step[:, None])


def reciprocal(scale: Array, ops: Arithmetic = PLAIN) -> Array:
    """Compute 1 / scale, or 0, which decodes to zeros, if the scale is zero or subnormal."""
    return jnp.where(scale < np.finfo(np.float32).tiny, np.float32(0), ops.reciprocal(scale))


def bfloat16_value(bits: Array) -> Array:
    """Convert bits of bfloat16, unsigned integers of any shape, to their float32 value."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << np.uint32(16), jnp.float32)


def bfloat16_bits(values: Array) -> Array:
    """Round float32 to the nearest bfloat16, as bits in uint16; any NaN or Inf becomes 0x7fc0."""
    rounded = values.astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(rounded, jnp.uint16)
    return jnp.where(jnp.isfinite(rounded), bits, np.uint16(NAN_BITS))
