"""The largest coordinates of each block of a vector: bytes, written and read with NumPy alone.

This is their specification. JAX (`islands._sparse`) shares the functions that take `xp`, which is
its namespace or that of NumPy, and the native codec for CPUs writes and reads the same bits. No
operation rounds twice, and none depends on the order of a sum or on subnormal numbers.

A block of `chunk` coordinates keeps `keep` of them. Their places are coded as by Elias and Fano:
the low bits of each, and one bit for each step of the high bits. Of 124 places among 4,096, this
takes 7.1 bits for each instead of 12. A value is an odd number times the scale of its block, a
bfloat16, so that none is rounded when it is decoded.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.islands.messages.formats import F32, Numbers, Section, check

_TINY = np.finfo(np.float32).tiny
_BLOCKS = 256  # that are decoded at a time, so that intermediate arrays stay small
CHUNKS = tuple(2**power for power in range(8, 17))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseFormat:
    """Format of a bucket: scales, high bits of places, low bits of places, codes of values.

    >>> form = SparseFormat(method="sparse", keep=124, chunk=4096, bits=1)
    >>> sum(form.widths)  # bytes of 4,096 coordinates
    128
    """

    method: str
    keep: int
    chunk: int
    bits: int

    def __post_init__(self) -> None:
        check(self, "chunk", type(self.chunk) is int and self.chunk in CHUNKS)
        check(self, "keep", type(self.keep) is int and 1 <= self.keep <= self.chunk // 2)
        check(self, "bits", type(self.bits) is int and 1 <= self.bits <= 4)

    @property
    def low_bits(self) -> int:
        """Bits of a place that are sent as they are."""
        return (self.chunk // self.keep).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Bits of a block for the high bits of its places: one of each place, one of each step."""
        return self.keep + (self.chunk >> self.low_bits) - 1

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Bytes of a block in each part: scale, high bits, low bits, codes."""
        bits = (self.high_bits, self.keep * self.low_bits, self.keep * self.bits)
        highs, lows, codes = (-(-each // 8) for each in bits)
        return 2, highs, lows, codes

    def blocks(self, size: int) -> int:
        """Return the blocks of a vector of a size."""
        return -(-size // self.chunk)

    def sections(self, size: int) -> tuple[Section, ...]:
        """Return the bytes of all blocks; see `Format.sections`."""
        return (Section("u1", self.blocks(size) * sum(self.widths)),)

    def check(self, sections: Sequence[Numbers], size: int) -> None:
        """Raise ValueError for bytes that no encoder makes: a block with more places, or fewer."""
        (message,) = sections
        highs = self.parts(message, self.blocks(size))[1].copy()
        highs[:, -1] &= 255 >> -self.high_bits % 8
        counts = np.bitwise_count(highs).sum(axis=1, dtype=np.int64)
        for block in np.flatnonzero(counts != self.keep)[:1]:
            raise ValueError(
                f"block {block} of a sparse message has {counts[block]} places, not {self.keep}: "
                "it is damaged. Send it again."
            )

    @np.errstate(all="ignore")  # NaN and Inf surface in scales
    def decode(self, sections: Sequence[Numbers], size: int) -> F32:
        """Decode a bucket that `check` accepts; see `Format.decode`."""
        (message,) = sections
        blocks = self.blocks(size)
        values = np.zeros((blocks, self.chunk), np.float32)
        parts = self.parts(message, blocks)
        for first in range(0, blocks, _BLOCKS):
            some = slice(first, first + _BLOCKS)
            scales, highs, *fields = (part[some] for part in parts)
            bits = np.unpackbits(highs, axis=1, bitorder="little", count=self.high_bits)
            highs = np.nonzero(bits)[1].reshape(-1, self.keep)
            np.put_along_axis(values[some], *self.kept(np, scales, highs, *fields), axis=1)
        return values.reshape(-1)[:size]

    @np.errstate(all="ignore")  # NaN and Inf surface in scales
    def encode(self, values: NDArray[Any], gain: float = 1.25) -> NDArray[np.uint8]:
        """Encode a vector with NumPy, for islands without JAX: uint8, as `sections` says.

        Of equal magnitudes, the first are kept.

        Args:
          values: float [size].
          gain: factor of all values; see `islands.Sparse`.
        """
        blocks = self.blocks(values.size)
        rows = np.zeros((blocks, self.chunk), np.float32)
        rows.reshape(-1)[: values.size] = values
        sizes = magnitudes(np, rows)
        least = np.partition(sizes, -self.keep, axis=1)[:, -self.keep, None]
        room = self.keep - np.sum(sizes > least, axis=1, keepdims=True)
        is_kept = (sizes > least) | (sizes == least) & (np.cumsum(sizes == least, axis=1) <= room)
        places = np.nonzero(is_kept)[1].reshape(blocks, self.keep).astype(np.int32)
        kept = np.take_along_axis(rows, places, axis=1)
        bits = np.zeros((blocks, self.high_bits), np.uint8)
        np.put_along_axis(bits, self.highs(np, places), np.uint8(1), axis=1)
        return np.asarray(self.written(np, kept, places, bits, gain))

    def parts(self, message: Any, blocks: int) -> list[Any]:
        """Cut the bytes of all blocks into the parts of `widths`, uint8 [blocks, bytes] each."""
        ends = itertools.accumulate((blocks * width for width in self.widths), initial=0)
        return [
            message[end : end + blocks * width].reshape(blocks, width)
            for end, width in zip(ends, self.widths, strict=False)
        ]

    def highs(self, xp: Any, places: Any) -> Any:
        """Return the bits that the high bits of places set: int32 [blocks, keep]."""
        return (places >> self.low_bits) + xp.arange(self.keep, dtype=np.int32)[None, :]

    def written(self, xp: Any, kept: Any, places: Any, bits: Any, gain: float) -> Any:
        """Write the bytes of all blocks.

        Args:
          xp: namespace of the arrays.
          kept: values that are kept, float32 [blocks, keep].
          places: where they are, in order, int32.
          bits: high bits of places, uint8 [blocks, high_bits].
          gain: factor of all values.
        """
        sizes, levels = magnitudes(xp, kept), 2 ** (self.bits - 1)
        whole = _sum_by_halves(xp, sizes) if levels == 1 else xp.max(sizes, axis=1)
        indices = xp.zeros_like(places)
        for k in range(1, levels):
            step = whole * np.float32(k / levels)
            indices = indices + (sizes > step[:, None]).astype(np.int32)
        parts = (
            _scale_bytes(xp, whole * self.factor(gain)),
            xp.packbits(bits, axis=1, bitorder="little"),
            _packed(xp, places & np.int32(2**self.low_bits - 1), self.low_bits),
            _packed(xp, indices << 1 | xp.signbit(kept).astype(np.int32), self.bits),
        )
        return xp.concatenate([part.reshape(-1) for part in parts])

    def kept(self, xp: Any, scales: Any, highs: Any, lows: Any, codes: Any) -> tuple[Any, Any]:
        """Return the places of blocks, int32 [blocks, keep], and the values there, float32.

        Args:
          xp: namespace of the arrays.
          scales: uint8 [blocks, 2].
          highs: places of the bits that are set, integers [blocks, keep].
          lows: low bits of places, uint8.
          codes: of values, uint8.
        """
        steps = highs.astype(np.int32) - xp.arange(self.keep, dtype=np.int32)[None, :]
        places = steps << self.low_bits | _unpacked(xp, lows, self.keep, self.low_bits)
        numbers = _unpacked(xp, codes, self.keep, self.bits)
        odd = (numbers >> 1 << 1 | 1).astype(np.float32)
        words = scales.astype(np.uint32)
        scale = ((words[:, 1] << 8 | words[:, 0]) << 16).view(np.float32)
        scale = xp.where(abs(scale) < _TINY, xp.copysign(np.float32(0), scale), scale)
        return places, xp.where(numbers & 1 != 0, -odd, odd) * scale[:, None]

    def factor(self, gain: float) -> np.float32:
        """Return the scale of a block over the sum of its sizes, or, of 2 bits up, the largest."""
        return np.float32(gain / (self.keep if self.bits == 1 else 2**self.bits))


def magnitudes(xp: Any, values: Any) -> Any:
    """Return magnitudes, float32: Inf of NaN, and 0 of subnormal numbers."""
    sizes = xp.where(xp.isnan(values), np.float32(np.inf), abs(values))
    return xp.where(sizes < _TINY, np.float32(0), sizes)


def _sum_by_halves(xp: Any, sizes: Any) -> Any:
    """Add up rows [blocks, count], padded to a power of two: their second half to the first one."""
    width = 1 << (sizes.shape[1] - 1).bit_length()
    sizes = xp.pad(sizes, ((0, 0), (0, width - sizes.shape[1])))
    while width > 1:
        width //= 2
        sizes = sizes[:, :width] + sizes[:, width:]
    return sizes[:, 0]


def _scale_bytes(xp: Any, scales: Any) -> Any:
    """Round scales to bfloat16, NaN if they are not finite: uint8 [blocks, 2]."""
    bits = xp.where(scales < _TINY, np.float32(0), scales).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    sent = xp.where(rounded < np.uint32(0x7F80), rounded, np.uint32(0x7FC0))
    return xp.stack([sent, sent >> 8], axis=1).astype(np.uint8)


def _unpacked(xp: Any, data: Any, count: int, width: int) -> Any:
    """Unpack fields of some bits, the lowest first: int32 [blocks, count]."""
    bits = xp.unpackbits(data, axis=1, bitorder="little", count=count * width)
    bits = bits.reshape(-1, count, width).astype(np.int32)
    return xp.sum(bits << xp.arange(width, dtype=np.int32)[None, None, :], axis=2, dtype=np.int32)


def _packed(xp: Any, fields: Any, width: int) -> Any:
    """Invert `_unpacked`: uint8 [blocks, bytes]."""
    bits = fields[:, :, None] >> xp.arange(width, dtype=np.int32)[None, None, :] & np.int32(1)
    bits = bits.reshape(len(fields), -1).astype(np.uint8)
    return xp.packbits(bits, axis=1, bitorder="little")
