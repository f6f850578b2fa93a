"""Codes of integers in messages of a fixed number of bytes, for `EntropyCoded`.

A message of a static size cannot hold all integers in fewer bits than the largest needs. A coder
holds those of an expected distribution, and tells if the ones at hand fit.
"""

import abc
import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.parts import match_varying, override
from pallas_kernels.codec import SUPER_GROUP_SIZE, packing, row_bytes

_PATCH_BYTES = 2  # of an integer in the list
_PATCH_SPREAD = 4  # standard deviations of the number of patches that there is room for


class Encoded(NamedTuple):
    """Integers as bytes."""

    body: Array  # uint8 [num_bytes]
    filled: Array  # float32 scalar: share of the room that is used; above 1, the body is useless


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerCoder(abc.ABC):
    """Lossless code of int16 [rows, 256] in a static number of bytes, if they fit."""

    rows: int

    @property
    def size(self) -> int:
        """Number of integers."""
        return self.rows * SUPER_GROUP_SIZE

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of a body."""

    @abc.abstractmethod
    def encode(self, integers: Array) -> Encoded:
        """Encode int16 [rows, 256]."""

    @abc.abstractmethod
    def decode(self, body: Array) -> Array:
        """Decode uint8 [num_bytes] to int16 [rows, 256]: any integers, if they did not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainCoder(IntegerCoder):
    """Two's complement of one width, which everything fits."""

    width: int  # bits of the widest integer

    @property
    @override
    def num_bytes(self) -> int:
        return self.rows * row_bytes(self.width)

    @override
    def encode(self, integers: Array) -> Encoded:
        words = lax.bitcast_convert_type(integers, jnp.uint16)
        body = jnp.concatenate(packing.pack(words, self.width))
        return Encoded(body, match_varying(jnp.float32(1), body))

    @override
    def decode(self, body: Array) -> Array:
        unused = packing.MAX_WIDTH - self.width
        words = packing.unpack(body, self.rows, self.width) << np.uint16(unused)
        integers = lax.bitcast_convert_type(words, jnp.int16) >> np.int16(unused)
        return integers.reshape(self.rows, SUPER_GROUP_SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchedCoder(IntegerCoder):
    """One width for most integers, and a list of the others (PFOR: Zukowski et al., ICDE 2006).

    The smallest code says that the integer is the next one of the list. So the list has no places,
    and all steps are those of vectors.
    """

    width: int
    patches: int  # room of the list

    @staticmethod
    def of_normal(rows: int, deviation: float, most: int) -> "PatchedCoder":
        """Return the smallest coder with room for normal integers of a standard deviation.

        Args:
          rows: rows of 256 in a message.
          deviation: standard deviation of the integers.
          most: bits that every integer fits.
        """

        def coder(width: int) -> PatchedCoder:
            outside = math.erfc((_largest(width) + 0.5) / deviation / math.sqrt(2))
            mean = outside * rows * SUPER_GROUP_SIZE
            return PatchedCoder(
                rows=rows,
                width=width,
                patches=math.ceil(1.02 * mean + _PATCH_SPREAD * math.sqrt(mean)),
            )

        return min((coder(width) for width in range(2, most + 1)), key=lambda one: one.num_bytes)

    @property
    @override
    def num_bytes(self) -> int:
        return self.rows * row_bytes(self.width) + self.patches * _PATCH_BYTES

    @override
    def encode(self, integers: Array) -> Encoded:
        largest = np.int16(_largest(self.width))
        outside = (integers > largest) | (integers < -largest)
        places, count = ordinals(outside)
        codes = jnp.where(outside, -largest - np.int16(1), integers)
        body = self._bulk.encode(codes).body
        # One place more takes what has none in the list.
        patches = match_varying(jnp.zeros(self.patches + 1, jnp.int16), body)
        places = jnp.where(outside, jnp.minimum(places, np.int32(self.patches)), self.patches)
        patches = patches.at[places].set(integers, mode="promise_in_bounds")[:-1]
        listed = lax.bitcast_convert_type(patches, jnp.uint8).reshape(-1)
        filled = count.astype(jnp.float32) / np.float32(max(self.patches, 1))
        filled = jnp.where(count > self.patches, jnp.maximum(filled, np.float32(2)), filled)
        return Encoded(jnp.concatenate([body, listed]), filled)

    @override
    def decode(self, body: Array) -> Array:
        codes = self._bulk.decode(body[: self._bulk.num_bytes])
        if not self.patches:
            return codes
        listed = body[self._bulk.num_bytes :].reshape(-1, _PATCH_BYTES)
        patches = lax.bitcast_convert_type(listed, jnp.int16)
        outside = codes == np.int16(-_largest(self.width) - 1)
        places, _ = ordinals(outside)
        return jnp.where(outside, patches.at[places].get(mode="clip"), codes)

    @property
    def _bulk(self) -> PlainCoder:
        return PlainCoder(rows=self.rows, width=self.width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoarseCoder:
    """Integers without their lowest bits, rounded without bias: what goes where they do not fit."""

    dropped: int  # low bits
    plain: PlainCoder

    @staticmethod
    def into(num_bytes: int, rows: int, width: int) -> "CoarseCoder":
        """Return the finest coder with at most some bytes for integers of a width."""
        most = num_bytes // (rows * row_bytes(1))
        kept = max(1, min(width, most))
        return CoarseCoder(dropped=width - kept, plain=PlainCoder(rows=rows, width=kept))

    def encode(self, integers: Array, noise: Array) -> Array:
        """Encode int16 [rows, 256] with float32 noise in (0, 1): uint8."""
        step, largest = np.float32(2**self.dropped), np.float32(_largest(self.plain.width))
        rounded = jnp.floor(integers.astype(jnp.float32) / step + noise)
        return self.plain.encode(jnp.clip(rounded, -largest, largest).astype(jnp.int16)).body

    def decode(self, body: Array) -> Array:
        """Decode the first bytes of uint8 to int16 [rows, 256]."""
        return self.plain.decode(body[: self.plain.num_bytes]) << np.int16(self.dropped)


def ordinals(flags: Array) -> tuple[Array, Array]:
    """Number the true ones of bool [rows, columns], row by row.

    Returns:
      For each place the number of true ones before it, int32 [rows, columns], and their total.
    """
    counts = flags.astype(jnp.int32)
    inside = jnp.cumsum(counts, axis=1)
    until = jnp.cumsum(inside[:, -1])
    before = until - inside[:, -1]
    return inside - counts + before[:, None], until[-1]


def _largest(width: int) -> int:
    return 2 ** (width - 1) - 1
