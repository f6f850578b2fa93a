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

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import Axis, RecodedChunks, WireCost, check_choice, check_flag, take_chunk
from dynamiq_jax.methods import _minifloat as minifloat
from dynamiq_jax.methods._base import Call
from dynamiq_jax.methods._blockwise import (
    BlockFormat,
    BlockwiseMethod,
    encode_message,
    in_blocks,
    rows_per_chunk,
)
from dynamiq_jax.methods._minifloat import BLOCK_SIZE, ELEMENTS, NAN_SCALE, Element
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index
from pallas_kernels.codec.scales import group_maxima


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MX(BlockwiseMethod):
    """Base of the formats: everything but their elements."""

    elements: ClassVar[tuple[str, ...]]  # that the format may have

    element: str  # format of the elements
    shared_scale: bool = False  # one scale for all hops, same bits; only e4m3 has the range for it

    def __post_init__(self):
        check_choice("element", self.element, self.elements)
        check_flag("shared_scale", self.shared_scale)

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
        scales = self._scales_of(rows)
        return self._code(rows, scales), scales

    @override
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        (scales,) = sides
        blocks = in_blocks(codes, BLOCK_SIZE)
        return minifloat.decode(blocks, scales[:, :, None], self._element).reshape(codes.shape)

    @override
    def wire_cost(self, call: Call) -> WireCost:
        if not self._shares_scales(call):
            return super().wire_cost(call)
        rows = rows_per_chunk(call.size, call.num_chunks)
        share = rows * self.format.blocks
        return WireCost(rows * self._codes_alone.row_bytes, call.axis.owners_bytes(share, share))

    @override
    def bind(self, values: Array, call: Call, key: Array) -> RecodedChunks:
        if not self._shares_scales(call):
            return super().bind(values, call, key)
        local = call.local_chunks(values, SUPER_GROUP_SIZE)
        scales, form = self._agree_on_scales(local.values, call.axis), self._codes_alone

        def encode(values: Array, chunk: Array, turn: Index) -> Array:
            of_chunk = take_chunk(scales, chunk)

            def code(rows: Array, first: Index) -> tuple[Array]:
                of_rows = lax.dynamic_slice_in_dim(of_chunk, first, rows.shape[0])
                return (self._code(rows, of_rows),)

            return encode_message(form, values, code)

        def decode(payload: Array, chunk: Array) -> Array:
            return self.decode_rows(*form.unpack(payload), take_chunk(scales, chunk)).reshape(-1)

        return RecodedChunks(local=local, encode=encode, decode=decode)

    @property
    def _codes_alone(self) -> BlockFormat:
        return dataclasses.replace(self.format, side_bytes=())

    def _shares_scales(self, call: Call) -> bool:
        # In a gather nothing is summed, so parts have scales of their own.
        return self.shared_scale and call.collective != "all_gather"

    def _scales_of(self, rows: Array) -> Array:
        """Compute the scales of float32 [rows, 256]: uint8 [rows, blocks]."""
        return minifloat.block_scales(group_maxima(rows, BLOCK_SIZE), self._element)

    def _code(self, rows: Array, scales: Array) -> Array:
        """Encode float32 [rows, 256] under scales, uint8 [rows, blocks]: uint16 [rows, 256]."""
        blocks = in_blocks(rows, BLOCK_SIZE)
        return minifloat.encode(blocks, scales[:, :, None], self._element).reshape(rows.shape)

    def _agree_on_scales(self, chunks: Array, axis: Axis) -> Array:
        """Return the largest scales of all workers, with headroom: uint8 [chunks, rows, blocks].

        The scales are raised so that no partial sum saturates. All values are below 2^(emax + 1)
        scales, so that partial sums of n workers are below n 2^(emax + 1) scales. Rounding crosses
        no power of two. So 2^emax new scales have to be at least the bound for n rounded up to a
        power of two. A scale beyond 2^127 becomes NaN, since the sum may be beyond float32.
        """
        rows = chunks.astype(jnp.float32).reshape(-1, SUPER_GROUP_SIZE)
        local = self._scales_of(rows).reshape(axis.size, -1)
        largest = axis.reduce_by_owners(local, lambda shares: jnp.max(shares, axis=0))
        exponents = 1 + (axis.size - 1).bit_length()  # of two, and of the workers
        raised = jnp.minimum(largest.astype(jnp.int32) + exponents, NAN_SCALE).astype(jnp.uint8)
        return raised.reshape(len(chunks), -1, self.format.blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(_MX):
    """MXFP8: 8.25 bits a coordinate on the wire.

    Every partial sum gets scales of its own. With `shared_scale`, all workers use the scale of the
    largest value of any worker, raised by 1 + ceil(log2 workers) exponents, so that no partial sum
    saturates. Formats of few exponent bits lack the range for these scales: over 8 workers the
    vNMSE is 0.6 times as large with e4m3, 9 times with MXFP4 and 40 times with MXINT8. A block that
    holds NaN or Inf is NaN. With `shared_scale`, sums above 2^126 may be NaN or Inf.

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
