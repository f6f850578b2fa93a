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


def pack(codes: Array, width: int) -> Array:
    """Packs uint32 `codes` [rows, 256] below 2**width into uint8 [rows, 32 * width]."""
    # Each plane is an OR-reduction over the lanes that share a byte. XLA:CPU vectorises a reduction
    # over a middle axis; spelled as slices and ORs of one fused value it runs at a fifth of the
    # speed.
    if len(planes(width)) == 1:
        return _merge_lanes(codes.astype(jnp.uint8), width)
    halves = _or_reduce(codes.reshape(-1, 2, SUPER_GROUP_SIZE // 2), shift=16)
    packed, low = [], 0
    for bits in planes(width):
        mask = np.uint32(2**bits - 1)
        first = (halves >> np.uint32(low)) & mask
        second = (halves >> np.uint32(16 + low)) & mask
        if bits == 8:
            packed += [first.astype(jnp.uint8), second.astype(jnp.uint8)]
        else:
            packed.append(_merge_lanes((first | second << np.uint32(4)).astype(jnp.uint8), bits))
        low += bits
    return jnp.concatenate(packed, axis=1)


def pieces(width: int) -> int:
    """Pieces that a row is unpacked in: quarters, or eighths where there is a 1-bit plane."""
    return 8 if width % 2 else 4


def unpack(packed: Array, width: int) -> list[Array]:
    """Inverse of `pack`: uint8 [rows, 32 * width] to `pieces(width)` consecutive uint32 pieces of
    each row, [rows, 256 / pieces].

    Pieces, because in every plane the lanes of a piece are one contiguous slice at one shift.
    """
    piece_size = SUPER_GROUP_SIZE // pieces(width)
    result = []
    for piece in range(pieces(width)):
        code = jnp.zeros((packed.shape[0], piece_size), jnp.uint32)
        low, start = 0, 0
        for bits in planes(width):
            slices = row_bytes(bits) // piece_size
            first = start + (piece % slices) * piece_size
            part = packed[:, first : first + piece_size]
            if bits < 8:
                part = (part >> np.uint8(bits * (piece // slices))) & np.uint8(2**bits - 1)
            code = code | part.astype(jnp.uint32) << np.uint32(low)
            low += bits
            start += row_bytes(bits)
        result.append(code)
    return result


def _merge_lanes(values: Array, bits: int) -> Array:
    """Merges uint8 [rows, m] whose bytes use every `8 / (m / (32 * bits))`-th field of `bits` bits
    into full bytes [rows, 32 * bits].
    """
    lanes = values.shape[1] // row_bytes(bits)
    return _or_reduce(values.reshape(-1, lanes, row_bytes(bits)), shift=bits)


def _or_reduce(values: Array, shift: int) -> Array:
    """OR over axis 1 of [rows, k, m], element i of the axis shifted left by `i * shift` bits."""
    shifts = np.arange(values.shape[1]).astype(values.dtype) * np.array(shift, values.dtype)
    return lax.reduce(
        values << shifts[None, :, None], np.array(0, values.dtype), lax.bitwise_or, (1,)
    )
