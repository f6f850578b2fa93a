"""A block of rows of one width to codes and scales, and back. All that a kernel fuses is composed
here.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec import packing, scales
from dynamiq_jax.codec.levels import level, num_levels, round_to_level
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE


def encode_rows(
    rows: Array, offset: Array | np.float32, *, width: int, nonuniformity: float, group_size: int
) -> tuple[tuple[Array, ...], Array, Array]:
    """Quantizes and packs a block of rows.

    Args:
      rows: float32 [rows, 256].
      offset: rounding offsets, float32 [rows, 256] or a scalar.
      width: bits of a code, 0 or 2 to 16.
      nonuniformity: e of the level spacing.
      group_size: coordinates that share a group scale.

    Returns:
      Planes of the codes (see `packing.pack`), group scales uint8 [rows, 256 / group_size],
      super-scales uint16 [rows].
    """
    group_bytes, super_bits = scales.quantize_scales(scales.group_maxima(rows, group_size))
    if width == 0:
        return (), group_bytes, super_bits
    inverse = scales.reciprocal(scales.reconstruct_scales(group_bytes, super_bits))
    magnitudes = jnp.abs(rows).reshape(*inverse.shape, group_size) * inverse[:, :, None]
    t = jnp.minimum(magnitudes.reshape(rows.shape), np.float32(1))
    # Through int32: a conversion from float32 to uint32 is not one instruction on most CPUs. NaN
    # becomes an arbitrary code here, within range after the mask; its row decodes to NaN by its
    # super-scale.
    magnitude = round_to_level(t, offset, width, nonuniformity).astype(jnp.int32).astype(jnp.uint32)
    sign = lax.bitcast_convert_type(rows, jnp.uint32) >> np.uint32(31)
    codes = (magnitude & np.uint32(num_levels(width))) | (sign << np.uint32(width - 1))
    return packing.pack(codes, width), group_bytes, super_bits


def decode_rows(
    planes: tuple[Array, ...],
    group_bytes: Array,
    super_bits: Array,
    *,
    width: int,
    nonuniformity: float,
    group_size: int,
) -> Array:
    """Inverse of `encode_rows` up to rounding: float32 [rows, 256]; NaN in every lane of a non-
    finite row.
    """
    scale = scales.reconstruct_scales(group_bytes, super_bits)
    num_rows = scale.shape[0]
    if width == 0:
        zeros = jnp.zeros((num_rows, SUPER_GROUP_SIZE), jnp.float32)
        return zeros * scale[:, :1]  # 0 * NaN is NaN: a dropped row still shows a non-finite input
    groups = scale.shape[1] // packing.pieces(width)
    values = []
    for piece, codes in enumerate(packing.unpack(planes, width)):
        magnitude = (codes & np.uint32(num_levels(width))).astype(jnp.int32).astype(jnp.float32)
        value = level(magnitude, width, nonuniformity)
        sign = (codes >> np.uint32(width - 1)) << np.uint32(31)
        signed = lax.bitcast_convert_type(
            lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32
        )
        piece_scale = scale[:, piece * groups : (piece + 1) * groups, None]
        scaled = signed.reshape(num_rows, groups, group_size) * piece_scale
        values.append(scaled.reshape(num_rows, -1))
    return jnp.concatenate(values, axis=1)
