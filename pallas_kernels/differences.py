"""Differences between what a backend returns and what the base does, counted in bytes.

Codes and group scales of a row that decodes to NaN have no meaning, and backends differ in them.
All other bytes of a message, and the bits of decoded values, are those of the base. Hardware whose
reciprocal or multiply-add rounds in another way moves some of them by one step, which is counted
apart. A norm is a sum, whose order is each backend's own.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pallas_kernels.codec import MAX_WIDTH, SUPER_GROUP_SIZE, Layout
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.scales import NAN_BITS

_NORM_ERROR = 1e-5  # of a norm, relative
_LAST_BITS = 2.0**-20  # of a decoded value, relative to the largest of its row
# Below these, hardware may flush an intermediate result to zero.
_TINY = 2.0**-110
_TINY_SUPER_SCALE = np.uint16((127 - 110) << 7)


class Difference(NamedTuple):
    """Difference between an output and that of the base."""

    compared: int  # bytes that have a meaning
    differing: int  # of them, those that differ
    is_rounding: bool  # whether another rounding of single operations explains all of them

    @property
    def text(self) -> str:
        """Description for errors and tables."""
        if not self.differing:
            return "no byte differs"
        kind = "by one step of rounding" if self.is_rounding else "by more than rounding"
        return f"{self.differing} of {self.compared} bytes differ, {kind}"


def compare(ours: Any, base: Any, layout: Layout, widths: NDArray[np.int32]) -> Difference:
    """Compare an output of an operation with that of the base.

    It is a message uint8 [bytes], norms float32 [rows], values float32 [rows, 256], or integers.
    The widths are those of the places of the chunk, int32 [rows_per_chunk].

    Raises:
      ValueError: shapes or dtypes differ.
    """
    ours, base = np.asarray(ours), np.asarray(base)
    if (ours.shape, ours.dtype) != (base.shape, base.dtype):
        raise ValueError(
            f"the output is {ours.dtype}{list(ours.shape)}, and that of the base "
            f"{base.dtype}{list(base.shape)}"
        )
    if base.dtype == np.uint8:
        return _of_messages(ours, base, layout, widths)
    return _of_norms(ours, base) if base.ndim == 1 else _of_values(ours, base)


def without_meaningless(
    message: Any, layout: Layout, widths: NDArray[np.int32]
) -> NDArray[np.uint8]:
    """Return a message, uint8 [bytes], with zeros in place of the bytes that have no meaning."""
    _, _, supers = _sections(message, layout, widths)
    return np.where(_counted(supers == NAN_BITS, layout, widths), message, np.uint8(0))


def _of_norms(ours: NDArray[Any], base: NDArray[Any]) -> Difference:
    with np.errstate(invalid="ignore"):
        near = np.abs(ours - base) <= _NORM_ERROR * np.abs(base) + _TINY
    right = near | (~np.isfinite(ours) & ~np.isfinite(base))
    return Difference(base.nbytes, 4 * int(np.sum(~right)), is_rounding=bool(np.all(right)))


def _of_values(ours: NDArray[Any], base: NDArray[Any]) -> Difference:
    differ = (ours.view(np.uint32) != base.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(base))
    in_bytes = (ours.view(np.uint8) != base.view(np.uint8)).reshape(*base.shape, 4)
    largest = np.max(np.abs(base), axis=1, keepdims=True, initial=0, where=np.isfinite(base))
    with np.errstate(invalid="ignore"):
        near = np.abs(ours - base) <= _LAST_BITS * largest + _TINY
    is_rounding = bool(np.all(near[differ]))
    return Difference(base.nbytes, int(np.sum(in_bytes & differ[..., None])), is_rounding)


def _of_messages(
    ours: NDArray[np.uint8], base: NDArray[np.uint8], layout: Layout, widths: NDArray[np.int32]
) -> Difference:
    (codes, groups, supers), (base_codes, base_groups, base_supers) = (
        _sections(message, layout, widths) for message in (ours, base)
    )
    lost = (supers == NAN_BITS) & (base_supers == NAN_BITS)
    counts = _counted(lost, layout, widths)
    differing = int(np.sum((ours != base) & counts))
    kept = ~lost & (base_supers >= _TINY_SUPER_SCALE)
    # A maximum that rounds in another way moves its super-scale by one step, and then up to 255
    # parts of it by 2 and a rounding.
    super_steps = np.abs(supers.astype(np.int64) - base_supers.astype(np.int64))
    same_super = super_steps[:, None] == 0
    steps = np.abs(groups - base_groups)
    # Where a scale has moved, its codes count in other steps.
    same_scale = np.repeat(same_super & (steps == 0), layout.group_size, axis=1)
    moved = np.where(same_scale, np.abs(codes - base_codes), 0)
    # The bytes that no row needs are zeros.
    unused = ours[UNIT * int(np.sum(widths)) : layout.group_scales_start]
    is_rounding = (
        np.max(super_steps[kept], initial=0) <= 1
        and np.all(steps[kept] <= np.where(same_super, 1, 3)[kept])
        and np.max(moved[kept], initial=0) <= 1
        and not (np.any(unused) or np.any(ours[layout.padding_start :]))
    )
    return Difference(int(np.sum(counts)), differing, bool(is_rounding))


def _sections(
    message: NDArray[np.uint8], layout: Layout, widths: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint16]]:
    """Read signed codes [rows, 256], group scales [rows, groups] and super-scales [rows]."""
    planes = message[: layout.group_scales_start].reshape(-1, UNIT)
    # Bit i of byte j belongs to lane j + 32 i.
    bits = np.unpackbits(planes, axis=1, bitorder="little").reshape(-1, UNIT, 8)
    lanes = bits.transpose(0, 2, 1).reshape(-1, SUPER_GROUP_SIZE).astype(np.int64)
    words = np.zeros((len(widths), SUPER_GROUP_SIZE), np.int64)
    for bit, unit in _planes(widths):
        count = int(np.sum(widths > bit))
        words[:count] |= lanes[unit : unit + count] << bit
    groups = message[layout.group_scales_start : layout.super_scales_start]
    supers = message[layout.super_scales_start : layout.padding_start]
    magnitudes = words >> 1
    return (
        np.where(words & 1, -magnitudes, magnitudes),
        groups.reshape(-1, layout.groups).astype(np.int64),
        supers.copy().view(np.uint16),
    )


def _counted(
    lost: NDArray[np.bool_], layout: Layout, widths: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which bytes of a message have a meaning."""
    counts = np.ones(layout.payload_bytes, bool)
    planes = counts[: layout.group_scales_start].reshape(-1, UNIT)
    for bit, unit in _planes(widths):
        planes[unit + np.flatnonzero(lost & (widths > bit))] = False
    groups = counts[layout.group_scales_start : layout.super_scales_start]
    groups.reshape(-1, layout.groups)[lost] = False
    return counts


def _planes(widths: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return (bit, first unit) of every plane."""
    rows = [int(np.sum(widths > bit)) for bit in range(MAX_WIDTH)]
    return [(bit, sum(rows[:bit])) for bit in range(MAX_WIDTH)]
