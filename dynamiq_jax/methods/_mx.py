"""Microscaling formats: blocks of 32 coordinates under a one-byte power of two.

Standard: Open Compute Project, Microscaling Formats Specification v1.0, September 2023.

Partial sums are added in float32 and rounded to the nearest element at every hop: deterministic,
and biased as rounding to nearest is. All formats treat values that are not finite alike: a block
that holds NaN or Inf has the scale NaN, and decodes to 32 NaN. The standard leaves Inf open, and
most formats have no code for it. Codes are sent in planes of whole rows of 256; the standard does
not define their place in memory.
"""

import dataclasses
from typing import ClassVar

from jax import Array

from dynamiq_jax._core import check_choice
from dynamiq_jax.methods import _minifloat as minifloat
from dynamiq_jax.methods._blockwise import BlockFormat, BlockwiseMethod, in_blocks
from dynamiq_jax.methods._minifloat import BLOCK_SIZE, ELEMENTS, Element
from pallas_kernels._jax.compat import override
from pallas_kernels.codec.scales import group_maxima


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MX(BlockwiseMethod):
    """Base of the formats: everything but their elements."""

    elements: ClassVar[tuple[str, ...]]  # that the format may have

    element: str  # format of the elements

    def __post_init__(self):
        check_choice("element", self.element, self.elements)

    @property
    def _element(self) -> Element:
        return ELEMENTS[self.element]

    @property
    @override
    def format(self) -> BlockFormat:
        return BlockFormat(bits=self._element.bits, block=BLOCK_SIZE, side_bytes=(1,))

    @property
    @override
    def native_format(self) -> str:
        return self.element

    @override
    def encode_rows(self, rows: Array, noise: Array | None) -> tuple[Array, ...]:
        scales = minifloat.block_scales(group_maxima(rows, BLOCK_SIZE), self._element)
        blocks = in_blocks(rows, BLOCK_SIZE)
        codes = minifloat.encode(blocks, scales[:, :, None], self._element)
        return codes.reshape(rows.shape), scales

    @override
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        (scales,) = sides
        blocks = in_blocks(codes, BLOCK_SIZE)
        return minifloat.decode(blocks, scales[:, :, None], self._element).reshape(codes.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(_MX):
    """MXFP8: 8.25 bits a coordinate on the wire.

    Every partial sum gets scales of its own. A block that holds NaN or Inf is NaN.

    >>> MXFP8(element="e5m2").element
    'e5m2'
    >>> MXFP8(element="e3m4")
    Traceback (most recent call last):
    ...
    ValueError: element='e3m4' is not possible. Give one of ('e4m3', 'e5m2').
    """

    elements: ClassVar[tuple[str, ...]] = ("e4m3", "e5m2")
    element: str = "e4m3"  # e5m2 has a bit of mantissa less, and a range that blocks hardly need


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP6(_MX):
    """MXFP6: 6.25 bits a coordinate on the wire. Otherwise like `MXFP8`."""

    elements: ClassVar[tuple[str, ...]] = ("e2m3", "e3m2")
    element: str = "e2m3"  # e3m2 has a bit of mantissa less, and more range inside a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(_MX):
    """MXFP4: 4.25 bits a coordinate on the wire. Otherwise like `MXFP8`."""

    elements: ClassVar[tuple[str, ...]] = ("e2m1",)
    element: str = "e2m1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXINT8(_MX):
    """MXINT8, two's complement in steps of 2^-6: 8.25 bits a coordinate on the wire.

    Otherwise like `MXFP8`. Saturates at -127 and 127 steps; the standard allows -128 as well.
    """

    elements: ClassVar[tuple[str, ...]] = ("int8",)
    element: str = "int8"
