"""The largest coordinates of each block of a vector: bytes, written and read with NumPy alone.

A block of `chunk` coordinates keeps `keep` of them. Their places are coded as by Elias and Fano:
the low bits of each, and one bit for each step of the high bits. Of 124 places among 4,096, this
takes 7.1 bits for each instead of 12. A value is an odd number times the scale of its block, a
bfloat16, so that none is rounded when it is decoded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.islands.messages.formats import (
    F32,
    Numbers,
    Section,
    bfloat16_value,
    check,
    flushed,
)

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

    def decode(self, sections: Sequence[Numbers], size: int) -> F32:
        """Decode a bucket that `check` accepts; see `Format.decode`."""
        (message,) = sections
        blocks = self.blocks(size)
        values = np.zeros((blocks, self.chunk), np.float32)
        parts = self.parts(message, blocks)
        for first in range(0, blocks, _BLOCKS):
            some = slice(first, min(first + _BLOCKS, blocks))
            scales, highs, lows, codes = (part[some] for part in parts)
            bits = np.unpackbits(highs, axis=1, bitorder="little", count=self.high_bits)
            steps = np.nonzero(bits)[1].reshape(-1, self.keep) - np.arange(self.keep)
            places = steps << self.low_bits | _unpacked(lows, self.keep, self.low_bits)
            numbers = _unpacked(codes, self.keep, self.bits)
            odd = (numbers >> 1 << 1 | 1).astype(np.float32)
            scale = flushed(bfloat16_value(scales.reshape(-1).view("<u2")))
            signed = np.where(numbers & 1, -odd, odd) * scale[:, None]
            np.put_along_axis(values[some], places, signed, axis=1)
        return values.reshape(-1)[:size]

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
        sizes = np.where(np.isnan(rows), np.float32(np.inf), np.abs(rows))
        least = np.partition(sizes, -self.keep, axis=1)[:, -self.keep, None]
        room = self.keep - np.sum(sizes > least, axis=1, keepdims=True)
        is_kept = (sizes > least) | (sizes == least) & (np.cumsum(sizes == least, axis=1) <= room)
        places = np.nonzero(is_kept)[1].reshape(blocks, self.keep)
        kept = np.take_along_axis(rows, places, axis=1)
        scales, indices = self._quantized(np.abs(kept), np.float32(gain))
        bits = np.zeros((blocks, self.high_bits), np.uint8)
        steps = (places >> self.low_bits) + np.arange(self.keep)
        np.put_along_axis(bits, steps, np.uint8(1), axis=1)
        parts = (
            scales.astype("<u2").view(np.uint8),
            np.packbits(bits, axis=1, bitorder="little"),
            _packed(places & (2**self.low_bits - 1), self.low_bits),
            _packed(indices << 1 | np.signbit(kept), self.bits),
        )
        return np.concatenate([part.reshape(-1) for part in parts])

    def parts(self, message: Numbers, blocks: int) -> list[Numbers]:
        """Cut the bytes of all blocks into scales, high bits, low bits and codes.

        Args:
          message: uint8, as `sections` says.
          blocks: number of blocks.

        Returns:
          Four arrays, uint8 [blocks, bytes].
        """
        ends = np.cumsum([blocks * width for width in self.widths])[:-1]
        pieces = zip(np.split(message, ends), self.widths, strict=True)
        return [piece.reshape(blocks, width) for piece, width in pieces]

    @np.errstate(all="ignore")  # NaN and Inf surface in scales
    def _quantized(self, sizes: F32, gain: np.float32) -> tuple[Numbers, Numbers]:
        """Return the scales of blocks as bits of bfloat16, and the index of each odd number."""
        levels = 2 ** (self.bits - 1)
        scale = sizes.mean(axis=1) if levels == 1 else sizes.max(axis=1) / np.float32(2 * levels)
        steps = np.ceil(sizes / (2 * scale)[:, None])
        scale = scale * gain
        bits = flushed(scale).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        rounded = np.where(np.isfinite(scale), rounded, 0x7FC0).astype(np.uint16)
        index = np.clip(np.nan_to_num(steps, nan=1), 1, levels) - 1
        return rounded, index.astype(np.int64)


def _unpacked(data: Numbers, count: int, width: int) -> NDArray[np.int64]:
    """Unpack fields of some bits, the lowest first: [blocks, count]."""
    bits = np.unpackbits(data, axis=1, bitorder="little", count=count * width)
    return bits.reshape(-1, count, width) @ (1 << np.arange(width))


def _packed(fields: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """Invert `_unpacked`: uint8 [blocks, bytes]."""
    bits = fields[:, :, None] >> np.arange(width) & 1
    return np.packbits(bits.reshape(len(fields), -1).astype(np.uint8), axis=1, bitorder="little")
