"""Codes of rows of one width to bytes: planes of 8, 4, 2 and 1 bits.

In a planar layout a byte holds lanes that lie far apart (`j` and `j + 128` in a 4-bit plane).
Packing and unpacking are then shifts of whole contiguous slices, which vectorize on a CPU and stay
coalesced on a GPU.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.shapes import UInt8, UInt16

SUPER_GROUP_SIZE = 256  # coordinates that share one width and one super-scale (paper, section 3)
MAX_WIDTH = 16  # bits of a code
WIDTHS = (0, *range(2, MAX_WIDTH + 1))  # a sign and at least one bit of magnitude, or nothing


def planes(width: int) -> tuple[int, ...]:
    """Return the bits of each plane of a `width`-bit code, low bits first: 13 -> (8, 4, 1)."""
    result = []
    for bits in (8, 8, 4, 2, 1):
        if width >= bits:
            result.append(bits)
            width -= bits
    return tuple(result)


def row_bytes(width: int) -> int:
    """Return the bytes of the codes of one row of 256."""
    return SUPER_GROUP_SIZE * width // 8


def pack(codes: UInt16[Array, "rows 256"], width: int) -> list[UInt8[Array, "_"]]:
    """Pack codes below 2**width into planes, low bits first.

    One after the other, the planes are what `unpack` takes.
    """
    packed, low = [], 0
    for bits in planes(width):
        packed.append(take_bits(codes, np.uint16(low), bits).reshape(-1))
        low += bits
    return packed


def take_bits(
    codes: UInt16[Array, "rows 256"], low: Array | np.uint16, bits: int
) -> UInt8[Array, "rows _"]:
    """Take a few bits of codes, from bit `low` on: one plane, `row_bytes(bits)` a row."""
    field = ((codes >> low) & np.uint16(2**bits - 1)).astype(jnp.uint8)
    if bits == 8:
        return field
    # An OR-reduction over the lanes that share a byte. XLA:CPU vectorizes a reduction over a middle
    # axis; spelled as slices and ORs of one fused value it runs at a fifth of the speed.
    field = field.reshape(-1, 8 // bits, row_bytes(bits)) << _shifts(bits)[None, :, None]
    return lax.reduce(field, np.uint8(0), lax.bitwise_or, (1,))


def unpack(packed: UInt8[Array, "_"], rows: int, width: int) -> UInt16[Array, "rows 8 32"]:
    """Invert `pack`, for all planes, `row_bytes(width)` a row: codes in eighths of rows."""
    # An eighth is the largest piece that is one slice at one shift in every plane. With an axis of
    # its own for it, XLA:CPU fuses all of this and vectorizes inside the eighth.
    codes, low, start = jnp.zeros((rows, 8, 32), jnp.uint16), 0, 0
    for bits in planes(width):
        lanes, stop = 8 // bits, start + rows * row_bytes(bits)
        plane = packed[start:stop].reshape(rows, 1, bits, 32)
        shares = jnp.broadcast_to(plane, (rows, lanes, bits, 32))
        field = (shares >> _shifts(bits)[None, :, None, None]) & np.uint8(2**bits - 1)
        field = field.reshape(rows, 8, 32).astype(jnp.uint16) << np.uint16(low)
        codes = codes | field if low else field
        low, start = low + bits, stop
    return codes


def _shifts(bits: int) -> np.ndarray:
    """Return where the fields of `bits` bits lie in a byte."""
    return np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
