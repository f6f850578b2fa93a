"""Rows to norms, codes and scales, and back: the arithmetic that a kernel fuses."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.shapes import Float32, UInt8, UInt16
from pallas_kernels.codec import scales
from pallas_kernels.codec.arithmetic import code_to_float
from pallas_kernels.codec.levels import Levels, TabulatedLevels, round_to_level

# Hardware flushes the reciprocals of larger numbers.
LARGEST_UNIT = scales.LARGEST_BITS.view(np.float32)


def l2_norm(values: Array, axis: int) -> Array:
    """Compute the L2 norm of any float32 values along an axis; not finite where a value is not."""
    # Squares of 1e-30 or 1e30 leave the range of float32.
    unit = jnp.minimum(jnp.max(jnp.abs(values), axis=axis, keepdims=True), LARGEST_UNIT)
    squares = jnp.sum((values * inverse_unit(unit)) ** 2, axis=axis)
    return jnp.squeeze(unit, axis) * jnp.sqrt(squares)


def inverse_unit(unit: Array) -> Array:
    """Return the factor of values before they are squared, for a `unit` up to `LARGEST_UNIT`."""
    return jnp.where(unit > np.finfo(np.float32).tiny, 1 / unit, np.float32(1))


def encode_rows(
    rows: Float32[Array, "rows 256"],
    offset: Float32[Array, "rows 256"] | np.float32,
    levels: Levels,
    *,
    group_size: int,
) -> tuple[UInt16[Array, "rows 256"], UInt8[Array, "rows groups"], UInt16[Array, "rows"]]:
    """Quantize rows with their levels and rounding offsets.

    Returns:
      Codes, group scales, super-scales.
    """
    group_bytes, super_bits = scales.quantize_scales(scales.group_maxima(rows, group_size))
    inverse = scales.reciprocal(scales.reconstruct_scales(group_bytes, super_bits))
    magnitudes = jnp.abs(rows).reshape(*inverse.shape, group_size) * inverse[:, :, None]
    t = jnp.minimum(magnitudes.reshape(rows.shape), np.float32(1))
    sign = lax.bitcast_convert_type(rows, jnp.uint32) >> np.uint32(31)
    # An offset moves a value in the same direction whatever its sign, so that the errors of values
    # of any signs cancel.
    of_magnitude = jnp.where(sign != 0, np.float32(1) - offset, offset)
    # NaN becomes an arbitrary code here. Its row decodes to NaN by its super-scale.
    magnitude = round_to_level(t, of_magnitude, levels)
    codes = (magnitude << np.uint32(1)) | sign
    return codes.astype(jnp.uint16), group_bytes, super_bits


def decode_rows(
    codes: UInt16[Array, "rows 256"],
    group_bytes: UInt8[Array, "rows groups"],
    super_bits: UInt16[Array, "rows"],
    levels: Levels | TabulatedLevels,
    *,
    group_size: int,
) -> Float32[Array, "rows 256"]:
    """Invert `encode_rows` up to rounding.

    All of a non-finite row is NaN, also at width 0: 0 * NaN is NaN.
    """
    scale = scales.reconstruct_scales(group_bytes, super_bits)
    words = codes.astype(jnp.uint32)
    value = levels.position(code_to_float(words >> np.uint32(1)))
    signed = jnp.where((words & np.uint32(1)) != 0, -value, value)
    return (signed.reshape(*scale.shape, group_size) * scale[:, :, None]).reshape(codes.shape)
