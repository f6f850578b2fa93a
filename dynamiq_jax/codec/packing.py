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
    """Packs uint32 `codes` [rows, 256] below 2**width into planes, uint8 [rows, 32 * bits] each."""
    # Each plane is an OR-reduction over the lanes that share a byte. XLA:CPU vectorises a reduction
    # over a middle axis; spelled as slices and ORs of one fused value it runs at a fifth of the
    # speed.
    if planes(width) == (width,):
        return (_merge_lanes(codes.astype(jnp.uint8), width),)
    halves = _or_reduce(codes.reshape(-1, 2, SUPER_GROUP_SIZE // 2), shift=16)
    packed, low = [], 0
    for bits in planes(width):
        first = (halves >> np.uint32(low)) & np.uint32(2**bits - 1)
        second = (halves >> np.uint32(16 + low)) & np.uint32(2**bits - 1)
        if bits == 8:
            packed.append(jnp.concatenate([first, second], axis=1).astype(jnp.uint8))
        else:
            packed.append(_merge_lanes((first | second << np.uint32(4)).astype(jnp.uint8), bits))
        low += bits
    return tuple(packed)


def pieces(width: int) -> int:
    """Pieces that a row is unpacked in: quarters, or eighths where there is a 1-bit plane."""
    return 8 if width % 2 else 4


def unpack(packed: tuple[Array, ...], width: int) -> list[Array]:
    """Inverse of `pack`: planes to `pieces(width)` consecutive pieces of each row, uint32
    [rows, 256 / pieces].

    Pieces, because in every plane the lanes of a piece are one contiguous slice at one shift.
    """
    piece_size = SUPER_GROUP_SIZE // pieces(width)
    result = []
    for piece in range(pieces(width)):
        code, low = None, 0
        for bits, plane in zip(planes(width), packed, strict=True):
            slices = row_bytes(bits) // piece_size
            first = (piece % slices) * piece_size
            part = plane[:, first : first + piece_size]
            if bits < 8:
                part = (part >> np.uint8(bits * (piece // slices))) & np.uint8(2**bits - 1)
            part = part.astype(jnp.uint32) << np.uint32(low)
            code = part if code is None else code | part
            low += bits
        assert code is not None, "width 0 has no codes"
        result.append(code)
    return result


def _merge_lanes(values: Array, bits: int) -> Array:
    """Merges fields of `bits` bits: uint8 [rows, m] into full bytes [rows, 32 * bits]."""
    lanes = values.shape[1] // row_bytes(bits)
    return _or_reduce(values.reshape(-1, lanes, row_bytes(bits)), shift=bits)


def _or_reduce(values: Array, shift: int) -> Array:
    """OR over axis 1 of [rows, k, m], element i of the axis shifted left by `i * shift` bits."""
    shifts = np.arange(values.shape[1]).astype(values.dtype) * np.array(shift, values.dtype)
    return lax.reduce(
        values << shifts[None, :, None], np.array(0, values.dtype), lax.bitwise_or, (1,)
    )
