"""Compressed parts of messages, decoded with NumPy alone: `docs/wire_format.md` for readers.

A format has the fields of its method that a reader needs. No value is a sum of a product, which a
compiler could fuse. So another implementation can return the same bits.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

F32 = NDArray[np.float32]
Numbers = NDArray[Any]  # unsigned integers, or those of one section

LANES = 256  # coordinates of a row
_NAN_BITS, _LARGEST_NORM, _LEAST_NORM = 0x7FC0, 0x7E80, 2  # of bfloat16
_ENERGY_LIMIT = 1 << 15
_BLOCK = 4096  # rows that are decoded at a time, so that intermediate arrays stay small


class Section(NamedTuple):
    """An array of numbers in a message, little-endian."""

    dtype: DTypeLike
    size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.size * np.dtype(self.dtype).itemsize


class Format(Protocol):
    """Format of a bucket, a flat vector. Fields come from a header: ValueError for a wrong one."""

    @property
    def method(self) -> str:
        """Name, as `dynamiq_jax.methods.METHODS` has it."""

    def sections(self, size: int) -> tuple[Section, ...]:
        """Return what a bucket of `size` coordinates sends, in order."""

    def decode(self, sections: Sequence[Numbers], size: int) -> F32:
        """Decode what `sections` describes to float32 [size]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordFormat:
    """Every coordinate as a float32 or a bfloat16."""

    method: str

    def sections(self, size: int) -> tuple[Section, ...]:
        """Return the words of whole rows."""
        dtype = {"exact": "<f4", "bf16": "<u2"}[self.method]
        return (Section(dtype, -(-size // LANES) * LANES),)

    def decode(self, sections: Sequence[Numbers], size: int) -> F32:
        """Return the words as float32; see `Format.decode`."""
        (words,) = sections
        return (bfloat16_value(words) if self.method == "bf16" else words)[:size]


class BlockScaledFormat(Protocol):
    """Codes of one width, and a scale for each block."""

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def scales(self) -> Section:
        """Scales of a row."""

    def decode_rows(self, codes: Numbers, scales: Numbers) -> F32:
        """Decode codes, uint16 [rows, blocks, coordinates], under scales [rows, blocks]."""


class _Blocks:
    """Bytes of a block-scaled format, and their decoding; see `Format`."""

    def sections(self: BlockScaledFormat, size: int) -> tuple[Section, ...]:
        """Return the planes of codes and the scales of whole rows, as bytes of one message."""
        row_bytes = LANES * self.bits // 8 + self.scales.num_bytes
        return (Section("u1", -(-size // LANES) * row_bytes),)

    def decode(self: BlockScaledFormat, sections: Sequence[Numbers], size: int) -> F32:
        """Decode some rows after the other."""
        (message,) = sections
        rows = -(-size // LANES)
        values = np.empty((rows, LANES), np.float32)
        planes, scales = np.split(message, [rows * LANES * self.bits // 8])
        scales = scales.view(self.scales.dtype).reshape(rows, -1)
        for part in _row_blocks(rows):
            codes = _unpack_codes(planes, rows, self.bits, part)
            codes = codes.reshape(len(codes), scales.shape[1], -1)
            values[part] = self.decode_rows(codes, scales[part]).reshape(len(codes), LANES)
        return values.reshape(-1)[:size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockIntFormat(_Blocks):
    """Integers times a bfloat16."""

    method: str
    code_bits: int
    block: int

    def __post_init__(self) -> None:
        check(self, "code_bits", type(self.code_bits) is int and 2 <= self.code_bits <= 8)
        check(self, "block", self.block in (32, 64, 128, 256) and type(self.block) is int)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code_bits

    @property
    def scales(self) -> Section:
        """Bits of bfloat16."""
        return Section("<u2", LANES // self.block)

    def decode_rows(self, codes: Numbers, scales: Numbers) -> F32:
        """Multiply codes by scales; see `BlockScaledFormat.decode_rows`."""
        top = 2 ** (self.code_bits - 1) - 1
        return product((codes.astype(np.int32) - top).astype(np.float32), bfloat16_value(scales))


# Bits of exponent and mantissa, bias, and the largest finite magnitude (OCP Microscaling Formats
# Specification v1.0). INT8 is one binade with six bits of mantissa, and its subnormals.
ELEMENTS = {
    "e4m3": (4, 3, 7, 0x7E),
    "e5m2": (5, 2, 15, 0x7B),
    "e3m2": (3, 2, 3, 0x1F),
    "e2m3": (2, 3, 1, 0x1F),
    "e2m1": (2, 1, 1, 0x7),
    "int8": (1, 6, 1, 0x7F),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFormat(_Blocks):
    """Small floating-point numbers under a power of two."""

    method: str
    element: str

    def __post_init__(self) -> None:
        known = {"mxfp8": ("e4m3", "e5m2"), "mxfp6": ("e2m3", "e3m2"), "mxfp4": ("e2m1",)}
        check(self, "element", self.element in known.get(self.method, ("int8",)))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + sum(ELEMENTS[self.element][:2])

    @property
    def scales(self) -> Section:
        """E8M0 bytes: biased exponents of two."""
        return Section("u1", LANES // 32)

    def decode_rows(self, codes: Numbers, scales: Numbers) -> F32:
        """Multiply elements by powers of two; see `BlockScaledFormat.decode_rows`.

        A result below the normal numbers is zero, and one above is Inf.
        """
        values = element_values(self.element)
        powers = np.ldexp(1.0, scales.astype(np.int32) - 127)  # float64: products are exact
        powers = np.where(scales == 255, np.nan, powers)
        return flushed((values[codes] * powers[:, :, None]).astype(np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamiQFormat:
    """Rows of different widths, which follow from norms that the message begins with."""

    method: str
    bits: float
    widths: tuple[int, ...]
    group_size: int
    exponent: float
    spacing: str
    gap_ratio: float

    def __post_init__(self) -> None:
        widths, ratio = self.widths, self.gap_ratio
        check(self, "group_size", self.group_size in (8, 16, 32) and type(self.group_size) is int)
        check(self, "widths", isinstance(widths, tuple) and 0 < len(widths) == len({*widths}))
        known = (0, *range(2, 17))
        check(self, "widths", all(type(width) is int and width in known for width in widths))
        check(self, "bits", type(self.bits) in (int, float) and 2.375 <= self.bits <= 16)
        check(self, "bits", min(widths) <= self.code_bits <= max(widths))
        check(self, "exponent", type(self.exponent) in (int, float) and 0.1 <= self.exponent <= 2)
        most = {"quadratic": 2.9, "geometric": 6.0}.get(self.spacing, math.nan)
        check(self, "spacing", most == most)
        check(self, "gap_ratio", type(ratio) in (int, float))
        check(self, "gap_ratio", ratio == 1 or 1.1 <= ratio <= most)

    @property
    def code_bits(self) -> float:
        """Bits of a coordinate for its code: all but scales and norms."""
        return self.bits - 8 / self.group_size - (16 + 16) / LANES

    def sections(self, size: int) -> tuple[Section, ...]:
        """Return the norms of rows, bits of bfloat16, and the message of a chunk."""
        rows = -(-size // LANES)
        used = 32 * int(self.code_bits * rows + 1e-6) + rows * (LANES // self.group_size + 2)
        return Section("<u2", rows), Section("u1", -(-used // 16) * 16)

    def decode(self, sections: Sequence[Numbers], size: int) -> F32:
        """Decode norms and a message; see `Format.decode`."""
        norms, message = sections
        rows, units = len(norms), int(self.code_bits * len(norms) + 1e-6)
        weights = np.where(norms > _LARGEST_NORM, _LEAST_NORM, norms.astype(np.int64))
        order = np.argsort(-weights, kind="stable")
        plane_rows = self.plane_rows(weights[order] >> 1, units)
        widths = np.sum(np.arange(rows)[:, None] < plane_rows, axis=1)
        starts = np.concatenate([[0], np.cumsum(plane_rows)])
        ends = np.cumsum([32 * units, rows * (LANES // self.group_size), 2 * rows])
        planes, groups, supers, _ = np.split(message, ends)
        planes, groups = planes.reshape(units, 32), groups.reshape(rows, -1)
        steps = product(bfloat16_value(supers.view("<u2")), np.float32(1 / 255))
        tables = [level_positions(width, self.spacing, self.gap_ratio) for width in range(17)]
        positions, offsets = np.concatenate(tables), np.cumsum([0, *map(len, tables[:-1])])
        values = np.empty((rows, LANES), np.float32)
        for part in _row_blocks(rows):
            codes = np.zeros((part.stop - part.start, LANES), np.uint16)
            for bit, count in enumerate(plane_rows - part.start):
                taken = planes[starts[bit] + part.start :][: max(0, min(count, len(codes)))]
                bits = np.unpackbits(taken[:, None, :], axis=1, bitorder="little")  # section 5
                codes[: len(taken)] |= bits.reshape(-1, LANES).astype(np.uint16) << np.uint16(bit)
            scales = product(groups[part].astype(np.float32), steps[part])
            magnitudes = positions[offsets[widths[part]][:, None] + (codes >> np.uint16(1))]
            signed = np.where(codes & np.uint16(1), -magnitudes, magnitudes)
            scaled = product(signed.reshape(*scales.shape, -1), scales)
            values[order[part]] = scaled.reshape(codes.shape)
        return values.reshape(-1)[:size]

    def plane_rows(self, energies: Numbers, units: int) -> Numbers:
        """Solve for the number of rows whose codes have bit 0, 1, ..., int64 [16]; section 1.

        Args:
          energies: logarithms of the energies of rows, largest first.
          units: bits of one lane of all rows together.
        """
        ends, needed = self.steps()
        bits = np.diff([0, *ends])
        ascending = -np.where(energies > 0, energies, -needed[-1])

        def rows_at(price: int) -> Numbers:
            thresholds = price + needed
            if 0 not in self.widths:
                thresholds[0] = min(thresholds[0], 1)  # only zeros may have no bits
            return np.searchsorted(ascending, -thresholds, side="right")

        low, high = -2 * int(needed[-1]), _ENERGY_LIMIT
        while low < high:  # the least price at which the rows do not take too much
            middle = (low + high) // 2
            if rows_at(middle) @ bits <= units:
                high = middle
            else:
                low = middle + 1
        rows, rest = rows_at(low), units - int(rows_at(low) @ bits)
        more = rows_at(low - 1) - rows
        for step, wanted in enumerate(more):  # some of those that would be wider at a price below
            rows[step] += min(int(wanted), max(0, rest // int(bits[step])))
            rest -= int(wanted * bits[step])
        step_of_bit = np.searchsorted(ends, np.arange(16), side="right")
        return np.append(rows, 0)[step_of_bit]

    def steps(self) -> tuple[Numbers, Numbers]:
        """Return the width that each step ends with, and the energy that it needs; section 1."""
        error = {width: 1 / (2 ** (width - 1) - 1) ** 2 if width else 1.0 for width in self.widths}

        def gain(before: int, after: int) -> float:
            return (error[before] - error[after]) / (after - before)

        first, *others = sorted(self.widths)
        path = [first]
        for width in others:
            while len(path) > 1 and gain(*path[-2:]) <= gain(path[-1], width):
                path.pop()
            path.append(width)
        gains = [gain(*pair) for pair in itertools.pairwise(path)]
        ends, needed = ([first], [0]) if first else ([], [])
        for width, saved in zip(path[1:], gains, strict=True):
            octaves = math.log2(gains[0] / saved) / self.exponent if saved < gains[0] else 0.0
            least = needed[-1] + 1 if needed else 0
            ends.append(width)
            needed.append(max(least, 1 + round(32 * octaves)))
        return np.array(ends), np.array(needed)


def check(form: Format, name: str, possible: bool) -> None:
    """Raise ValueError for a field of a format that is not possible."""
    if not possible:
        raise ValueError(
            f"the message has {name}={getattr(form, name)!r:.80}, which {form.method} does not have"
        )


def bfloat16_value(bits: Numbers) -> F32:
    """Return the float32 values of bits of bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def product(values: F32, scales: Any) -> F32:
    """Multiply values [..., n] by scales [...], with subnormal numbers of both flushed."""
    return flushed(values * flushed(np.asarray(scales, np.float32))[..., None])


def flushed(values: NDArray[Any]) -> NDArray[Any]:
    """Return values with zeros, of the same sign, in the place of subnormal numbers."""
    if values.dtype.kind == "c":
        return flushed(np.stack([values.real, values.imag], -1)).view(values.dtype)[..., 0]
    if values.dtype.kind != "f":
        return values
    tiny = np.finfo(values.dtype).tiny
    return np.where(np.abs(values) < tiny, np.copysign(values.dtype.type(0), values), values)


def level_positions(width: int, spacing: str, gap_ratio: float) -> F32:
    """Return f(0) .. f(L) of a width, computed in float64: float32 [L + 1]."""
    top = 2 ** (width - 1) - 1 if width else 0
    codes = np.arange(top + 1, dtype=np.float64)
    if top < 2 or gap_ratio == 1:
        return (codes / max(top, 1)).astype(np.float32)
    if spacing == "quadratic":
        growth = (gap_ratio - 1) / (top - 1) / 2
        positions = codes * (1 + (codes - 1) * growth) / (top * (1 + (top - 1) * growth))
    else:
        log_base = math.log(gap_ratio) / (top - 1)
        positions = np.expm1(log_base * codes) / math.expm1(log_base * top)
    return positions.astype(np.float32)


def element_values(element: str) -> NDArray[np.float64]:
    """Return the values of all codes of an element of a microscaling format."""
    exponent_bits, mantissa_bits, bias, largest = ELEMENTS[element]
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    fields, fractions = np.divmod(codes, 2**mantissa_bits)
    wholes = np.where(fields > 0, fractions + 2**mantissa_bits, fractions)
    values = np.ldexp(wholes.astype(float), np.maximum(fields, 1) - bias - mantissa_bits)
    # Above the largest are Inf, where that has an exponent of its own, and NaN.
    above = np.where((codes == largest + 1) & (fractions == 0), np.inf, np.nan)
    values = np.where(codes > largest, above, values)
    if element == "int8":  # two's complement
        return np.concatenate([values, [-2.0], -values[:0:-1]])
    return np.concatenate([values, -values])


def _row_blocks(rows: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, rows)) for start in range(0, rows, _BLOCK)]


def _unpack_codes(planes: Numbers, rows: int, width: int, part: slice) -> Numbers:
    """Unpack the codes of some rows, uint16 [rows, 256], all of one width; section 8."""
    codes, low, start = np.zeros((part.stop - part.start, LANES), np.uint16), 0, 0
    for bits in (8, 4, 2, 1):
        if not width & bits:
            continue
        plane = planes[start : start + 32 * bits * rows].reshape(rows, 1, -1)[part]
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, :, None]
        fields = (plane >> shifts) & np.uint8(2**bits - 1)
        codes |= fields.reshape(len(codes), LANES).astype(np.uint16) << np.uint16(low)
        low, start = low + bits, start + 32 * bits * rows
    return codes
