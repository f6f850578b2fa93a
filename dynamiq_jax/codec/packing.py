"""Codes to bytes: planar packing of any width from planes of 8, 4, 2 and 1 bits.

Planar means that a byte holds lanes that lie far apart (`j`, `j + 128` in a 4-bit plane), so
neither direction interleaves neighbours: it is shifts of whole contiguous slices, which vectorise
on a CPU and stay coalesced on a GPU.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

SUPER_GROUP_SIZE = 256  # coordinates that share one width and one super-scale (paper, section 3)
WIDTHS = (0, *range(2, 17))  # bits of a code: a sign and at least one bit of magnitude, or nothing


def planes(width: int) -> tuple[int, ...]:
    """Bits of each plane of a `width`-bit code, low bits first: 6 -> (4, 2), 13 -> (8, 4, 1)."""
    result = []
    for bits in (8, 8, 4, 2, 1):
        if width >= bits:
            result.append(bits)
            width -= bits
    return tuple(result)


def row_bytes(width: int) -> int:
    """Bytes that the codes of one row of 256 take."""
    return SUPER_GROUP_SIZE * width // 8


def pack(codes: Array, width: int) -> tuple[Array, ...]:
    """Packs uint16 `codes` [rows, 256] below 2**width into planes, uint8 [rows, 32 * bits] each."""
    # Each plane is an OR-reduction over the lanes that share a byte. XLA:CPU vectorises a reduction
    # over a middle axis; spelled as slices and ORs of one fused value it runs at a fifth of the
    # speed.
    packed, low = [], 0
    for bits in planes(width):
        field = ((codes >> np.uint16(low)) & np.uint16(2**bits - 1)).astype(jnp.uint8)
        packed.append(_merge_lanes(field, bits))
        low += bits
    return tuple(packed)


def unpack(packed: tuple[Array, ...], rows: int, width: int) -> Array:
    """Inverse of `pack`: planes to codes, uint16 [rows, 8, 32], a row in eighths."""
    # An eighth is the largest piece that is one slice at one shift in every plane: with it as an
    # axis of its own, XLA:CPU fuses all of this and vectorises inside the eighth.
    codes, low = None, 0
    for bits, plane in zip(planes(width), packed, strict=True):
        lanes = 8 // bits
        shifts = np.arange(lanes, dtype=np.uint8) * np.uint8(bits)
        shares = jnp.broadcast_to(plane.reshape(rows, 1, bits, 32), (rows, lanes, bits, 32))
        field = (shares >> shifts[:, None, None]) & np.uint8(2**bits - 1)
        field = field.reshape(rows, 8, 32).astype(jnp.uint16) << np.uint16(low)
        codes = field if codes is None else codes | field
        low += bits
    return jnp.zeros((rows, 8, 32), jnp.uint16) if codes is None else codes


def _merge_lanes(values: Array, bits: int) -> Array:
    """Merges fields of `bits` bits: uint8 [rows, 256] into full bytes [rows, 32 * bits]."""
    lanes = 8 // bits
    if lanes == 1:
        return values
    shifts = np.arange(lanes, dtype=np.uint8) * np.uint8(bits)
    values = values.reshape(-1, lanes, row_bytes(bits)) << shifts[None, :, None]
    return lax.reduce(values, np.uint8(0), lax.bitwise_or, (1,))
