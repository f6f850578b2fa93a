"""Codes of rows of different widths to bytes: one bit plane for every bit.

Rows of a message are sorted by width, widest first. So plane k, which holds bit k of the codes,
covers the first rows of the message, and a message is its planes one after the other. Where a plane
starts follows from the number of rows in each: widths are data, and shapes do not depend on them.

A byte of a plane holds lanes that lie far apart (`j`, `j + 32`, ...), as those of `packing` do.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.compat import match_varying
from pallas_kernels._jax.platforms import platform_dependent
from pallas_kernels._jax.shapes import Int32, UInt8, UInt16
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.packing import MAX_WIDTH, SUPER_GROUP_SIZE, take_bits

UNIT = SUPER_GROUP_SIZE // 8  # bytes of a row in a plane
Planes = UInt8[Array, "units 32"]

_BITS = np.uint8(1) << np.arange(8, dtype=np.uint8)


def pack(
    units: Planes,
    codes: UInt16[Array, "count 256"],
    widths: Int32[Array, "count"],
    starts: Int32[Array, "bits"],
    first: Index,
) -> Planes:
    """Write the codes of consecutive places of a chunk into its planes, and nothing else.

    Args:
      units: planes, with room for `count` units after the last.
      codes: of the places.
      widths: of the places, not increasing.
      starts: first unit of every plane, of 16 or more.
      first: the first of the places.
    """
    functions = {"cpu": pack_one_by_one, "default": pack_at_once}
    return platform_dependent(functions, units, codes, widths, starts, first)


def unpack(
    units: Planes, widths: Int32[Array, "count"], starts: Int32[Array, "bits"], first: Index
) -> UInt16[Array, "count 8 32"]:
    """Read the codes that `pack` writes, each row in eighths."""
    # `jax.vmap` computes both branches below with operands that vary as their condition does. A
    # constant of a branch would be one that JAX marks as varying for a second time.
    flags = match_varying(jnp.asarray(_BITS)[None, :, None], widths)
    functions = {"cpu": _read_as_needed, "default": _read_two_bytes}
    codes = platform_dependent(functions, units, starts[:MAX_WIDTH] + first, flags, widths)
    masks = (np.uint32(1) << widths.astype(jnp.uint32)) - np.uint32(1)
    return codes & masks.astype(jnp.uint16)[:, None, None]


def _read_as_needed(units: Array, starts: Array, flags: Array, widths: Array) -> Array:
    """Read two bytes of each code if a row has more than eight bits, and one if none has.

    XLA:CPU would compute the codes again wherever they are used, but not across a branch. On a TPU,
    a branch would fix the layout of its arrays.
    """
    operands = (units, starts, flags, widths)
    return lax.cond(widths[0] > 8, _read_two_bytes, _read_low_byte, *operands)


def _read_two_bytes(units: Array, starts: Array, flags: Array, widths: Array) -> Array:
    low = _read_low_byte(units, starts, flags, widths)
    return low | (_read_low_byte(units, starts[8:], flags, widths) << np.uint16(8))


def _read_low_byte(units: Array, starts: Array, flags: Array, widths: Array) -> Array:
    # All eight bits at once: XLA:CPU makes one pass of it, which is faster than a loop over those
    # that the rows have. What a row lacks is masked afterwards.
    slabs = [_rows_from(starts[bit], units, len(widths)) for bit in range(8)]
    fields = [_spread(slab, flags, bit) for bit, slab in enumerate(slabs)]
    return functools.reduce(operator.or_, fields).astype(jnp.uint16)


def pack_one_by_one(
    units: Array, codes: Array, widths: Array, starts: Array, first: Index
) -> Array:
    """Pack with a loop over the planes that the rows have, which is faster on a CPU."""

    def write(bit: Array, units: Array) -> Array:
        plane = take_bits(codes, bit.astype(jnp.uint16), 1)
        return _write(units, plane, widths, starts, first, bit)

    return lax.fori_loop(0, widths[0], write, units)


def pack_at_once(units: Array, codes: Array, widths: Array, starts: Array, first: Index) -> Array:
    """Pack all planes from one transposition of bits, which is faster on accelerators."""
    eighths = [codes[:, lane : lane + UNIT] for lane in range(0, SUPER_GROUP_SIZE, UNIT)]
    # Low bytes are planes 0 to 7, high bytes planes 8 to 15. Without the barrier, every plane would
    # compute its word again.
    words = lax.optimization_barrier(transpose(eighths))
    for bit in range(MAX_WIDTH):
        plane = (words[bit % 8] >> np.uint16(bit // 8 * 8)).astype(jnp.uint8)
        units = _write(units, plane, widths, starts, first, bit)
    return units


Select = Callable[[np.unsignedinteger, Array, Array], Array]  # (mask, ones, zeros)


def _select(mask: np.unsignedinteger, ones: Array, zeros: Array) -> Array:
    return zeros ^ ((zeros ^ ones) & mask)


def transpose(words: Sequence[Array], select: Select = _select) -> list[Array]:
    """Swap bit i of byte b of word k and bit k of byte b of word i, for eight unsigned words.

    `select` takes the bits of `ones` where a mask has ones, and those of `zeros` elsewhere.
    """
    words = list(words)
    number = words[0].dtype.type
    in_every_byte = np.iinfo(number).max // 0xFF
    for shift, low in ((4, 0x0F), (2, 0x33), (1, 0x55)):
        by, mask = number(shift), number(low * in_every_byte)
        for first, second in ((i, i + shift) for i in range(8) if not i & shift):
            a, b = words[first], words[second]
            words[first], words[second] = select(mask, a, b << by), select(mask, a >> by, b)
    return words


def _write(
    units: Planes,
    plane: UInt8[Array, "count 32"],
    widths: Int32[Array, "count"],
    starts: Array,
    first: Index,
    bit: Index,
) -> Planes:
    """Write a part of a plane."""
    at = starts[bit] + first
    # The last of the rows may lack this plane: the units belong to others.
    mine = jnp.where((widths > bit)[:, None], plane, _rows_from(at, units, len(plane)))
    return lax.dynamic_update_slice_in_dim(units, mine, at, axis=0, allow_negative_indices=False)


def _rows_from(start: Array, units: Array, count: int) -> Array:
    """Read consecutive units. Programs are shorter where JAX need not expect a negative index."""
    return lax.dynamic_slice_in_dim(units, start, count, allow_negative_indices=False)


def _spread(plane: UInt8[Array, "rows 32"], flags: Array, bit: int) -> UInt8[Array, "rows 8 32"]:
    """Spread the bits of bytes to one bit of as many bytes."""
    # In eighths of rows, for the reason of `packing.unpack`. Vectors of bytes have no shift.
    has_bit = (plane[:, None, :] & flags) != 0
    return jnp.where(has_bit, np.uint8(1 << bit), np.uint8(0))
