"""Codes to bytes: planar packing of any even width from planes of 8, 4 and 2 bits.

Planar means that a byte holds lanes that lie far apart (`j`, `j + 128` in a 4-bit plane), so
neither direction interleaves neighbours: it is shifts of whole contiguous slices, which vectorise
on a CPU and stay coalesced on a GPU.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

SUPER_GROUP_SIZE = 256  # coordinates that share one width and one super-scale (paper, section 3)
WIDTHS = tuple(range(0, 17, 2))  # widths that planes can make


def planes(width: int) -> tuple[int, ...]:
    """Bits of each plane of a `width`-bit code, low bits first: 6 -> (4, 2), 14 -> (8, 4, 2)."""
    result = []
    for bits in (8, 8, 4, 2):
        if width >= bits:
            result.append(bits)
            width -= bits
    return tuple(result)


def row_bytes(width: int) -> int:
    """Bytes that the codes of one row of 256 take."""
    return SUPER_GROUP_SIZE * width // 8


def pack(codes: Array, width: int) -> Array:
    """Packs uint32 `codes` [rows, 256] below 2**width into uint8 [rows, 32 * width]."""
    # Each plane is an OR-reduction over the lanes that share a byte. XLA:CPU vectorises a reduction
    # over a middle axis; the same thing spelled as slices and ORs of one fused value runs at a
    # fifth of the speed.
    if width <= 8 and len(planes(width)) == 1:
        return _merge_lanes(codes, width)
    halves = _or_reduce(codes.reshape(-1, 2, SUPER_GROUP_SIZE // 2), shift=16)
    packed, low = [], 0
    for bits in planes(width):
        mask = np.uint32(2**bits - 1)
        first = (halves >> np.uint32(low)) & mask
        second = (halves >> np.uint32(16 + low)) & mask
        if bits == 8:
            packed += [first.astype(jnp.uint8), second.astype(jnp.uint8)]
        elif bits == 4:
            packed.append((first | second << np.uint32(4)).astype(jnp.uint8))
        else:
            quarters = (first | second << np.uint32(4)).reshape(-1, 2, SUPER_GROUP_SIZE // 4)
            packed.append(_or_reduce(quarters, shift=2).astype(jnp.uint8))
        low += bits
    return jnp.concatenate(packed, axis=1)


def unpack(packed: Array, width: int) -> list[Array]:
    """Inverse of `pack`: uint8 [rows, 32 * width] to four uint32 arrays [rows, 64], the quarters of
    each row.

    Quarters, because in every plane the lanes of a quarter are one contiguous slice at one constant
    shift.
    """
    quarter_size = SUPER_GROUP_SIZE // 4
    quarters = []
    for quarter in range(4):
        code, low, start = None, 0, 0
        for bits in planes(width):
            slices = bits // 2  # contiguous quarter-sized byte slices in this plane
            first = start + (quarter % slices) * quarter_size
            piece = packed[:, first : first + quarter_size]
            if bits < 8:
                piece = (piece >> np.uint8(bits * (quarter // slices))) & np.uint8(2**bits - 1)
            piece = piece.astype(jnp.uint32) << np.uint32(low)
            code = piece if code is None else code | piece
            low += bits
            start += row_bytes(bits)
        quarters.append(code)
    return quarters


def _merge_lanes(codes: Array, bits: int) -> Array:
    lanes = 8 // bits
    if lanes == 1:
        return codes.astype(jnp.uint8)
    return _or_reduce(
        codes.astype(jnp.uint8).reshape(-1, lanes, SUPER_GROUP_SIZE // lanes), shift=bits
    )


def _or_reduce(values: Array, shift: int) -> Array:
    """OR over axis 1 of [rows, k, m], element i of the axis shifted left by `i * shift` bits."""
    shifts = np.arange(values.shape[1]).astype(values.dtype) * np.array(shift, values.dtype)
    return lax.reduce(
        values << shifts[None, :, None], np.array(0, values.dtype), lax.bitwise_or, (1,)
    )
