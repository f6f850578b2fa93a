"""Hierarchical scales: a byte per group under a bfloat16 per super-group.

Both are rounded up, and coordinates are normalised by the scale that the decoder will reconstruct,
so every value is in range and the estimate stays unbiased without a second random draw (paper,
section 4). Nothing has an absolute epsilon: gradients of 1e-30 survive.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec.arithmetic import PLAIN, Arithmetic

_NAN_BITS = np.uint32(0x7FC0)
LARGEST_BITS = np.uint32(0x7E800000)  # 2^126 as float32: the reciprocal of more is subnormal


def group_maxima(rows: Array, group_size: int) -> Array:
    """max |x| of each group: float32 [rows, 256] to its bits, uint32 [rows, 256 / group_size].

    Compared as integers, whose order is that of the magnitudes with NaN on top: XLA:CPU's float
    reductions, and Triton's, drop NaN.
    """
    bits = lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)
    # In two steps, of two types so that XLA does not make one of them again: the first vectorises,
    # a reduction over 32 neighbours does not.
    quarters = jnp.max(bits.reshape(rows.shape[0], -1, 4, group_size // 4), axis=2)
    return jnp.max(quarters.astype(jnp.uint32), axis=-1)


def quantize_super_scales(maxima: Array) -> Array:
    """Bits of row maxima to super-scales: uint32, any shape, to bfloat16 bits in uint32.

    A row that holds NaN, Inf or more than 2^126 gets a NaN, which every coordinate of it will
    decode to: an integer code cannot carry it.
    """
    rounded_up = (maxima + np.uint32(0xFFFF)) >> np.uint32(16)
    return jnp.where(maxima <= LARGEST_BITS, rounded_up, _NAN_BITS)


def quantize_group_scales(maxima: Array, super_bits: Array, ops: Arithmetic = PLAIN) -> Array:
    """Bits of group maxima, uint32, and super-scales, bfloat16 bits in uint32 of a shape that
    broadcasts, to group scales: float32 integers 0 .. 255.
    """
    inverse = reciprocal(bfloat16_value(super_bits), ops)
    share = lax.bitcast_convert_type(maxima, jnp.float32) * inverse
    return jnp.minimum(ops.ceil(share * np.float32(255)), np.float32(255))


def quantize_scales(maxima: Array) -> tuple[Array, Array]:
    """Group maxima (bits, uint32 [rows, groups]) to group scales uint8 [rows, groups] and
    super-scales (bfloat16 bits) uint16 [rows].
    """
    super_bits = quantize_super_scales(jnp.max(maxima, axis=-1))
    group_scales = quantize_group_scales(maxima, super_bits[:, None])
    return group_scales.astype(jnp.int32).astype(jnp.uint8), super_bits.astype(jnp.uint16)


def row_energies(group_bytes: Array, super_bits: Array) -> Array:
    """Logarithm of the sum of squared group scales, to which a row's squared error is proportional,
    as an integer, which is the same on all hardware.

    Args:
      group_bytes: group scales, uint8 [..., groups].
      super_bits: super-scales, bfloat16 bits, uint16 [...].

    Returns:
      uint16 [...], below 2^15: 32 steps an octave; 0 for a row that decodes to NaN anyway.
    """
    squares = jnp.sum(jnp.square(group_bytes.astype(jnp.int32)), axis=-1)  # below 2^24: exact
    # The upper half of a float's bits is a logarithm, if linear within each octave.
    log_squares = lax.bitcast_convert_type(squares.astype(jnp.float32), jnp.uint32) >> np.uint32(16)
    words = super_bits.astype(jnp.uint32)
    energies = (np.uint32(2) * words + log_squares) >> np.uint32(2)
    return jnp.where(words == _NAN_BITS, np.uint32(0), energies).astype(jnp.uint16)


def reconstruct_scales(group_bytes: Array, super_bits: Array) -> Array:
    """Scales of both ends: integers below 256 [rows, groups] and bfloat16 bits, unsigned integers
    [rows], to float32 [rows, groups].
    """
    return scale_of_groups(group_bytes.astype(jnp.int32).astype(jnp.float32), super_bits)


def scale_of_groups(group_scales: Array, super_bits: Array) -> Array:
    """`reconstruct_scales` of group scales that are float32 integers already."""
    return group_scales * scale_step(super_bits.astype(jnp.uint32))[:, None]


def scale_step(super_bits: Array) -> Array:
    """Scale of a group whose byte is 1: bfloat16 bits in uint32, any shape, to float32."""
    # Multiplied before the group scale, as XLA would choose anyway: a step below the smallest
    # normal is flushed, so rows whose largest magnitude is below 2^-118 decode to zeros.
    return bfloat16_value(super_bits) * np.float32(1 / 255)


def reciprocal(scale: Array, ops: Arithmetic = PLAIN) -> Array:
    """1 / scale, and 0 where the scale is zero or subnormal: the group then decodes to zeros."""
    return jnp.where(scale < np.finfo(np.float32).tiny, np.float32(0), ops.reciprocal(scale))


def bfloat16_value(bits: Array) -> Array:
    """uint32 words that hold bfloat16 bits to their float32 value."""
    return lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)


def bfloat16_bits(values: Array) -> Array:
    """float32 to the bits (uint16) of the nearest bfloat16; any NaN or Inf becomes the one pattern
    0x7fc0.
    """
    rounded = values.astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(rounded, jnp.uint16)
    return jnp.where(jnp.isfinite(rounded), bits, np.uint16(_NAN_BITS))
