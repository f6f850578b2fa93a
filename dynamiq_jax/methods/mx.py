"""Microscaling formats on the wire: blocks of 32 coordinates under a one-byte power of two (Open
Compute Project, Microscaling Formats Specification v1.0, September 2023).

Partial sums are added in float32 and rounded to the nearest element at every hop: deterministic,
and biased as rounding to nearest is. One rule for everything that is not finite, in all formats
alike: a block that holds NaN or Inf has the scale NaN, and decodes to 32 NaN. The standard leaves
Inf open, and most formats have no code for it. Codes travel in the planes of `codec/packing.py`,
which take whole rows of 256; the standard says nothing of their place in memory.
"""

import abc
import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.chunks import RecodedChunks, WireCost
from dynamiq_jax.codec import minifloat, packing
from dynamiq_jax.codec.blocks import as_row_chunks, rows_per_chunk
from dynamiq_jax.codec.minifloat import BLOCK_SIZE, ELEMENTS, NAN_SCALE, Element
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.codec.scales import group_maxima
from dynamiq_jax.methods.base import ChunkedMethod
from pallas_kernels.blocks import for_each_block

_BLOCKS = SUPER_GROUP_SIZE // BLOCK_SIZE  # scales in a row

FP8 = Literal["e4m3", "e5m2"]
FP6 = Literal["e2m3", "e3m2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MX(ChunkedMethod):
    """What the formats share: all but their elements."""

    shared_scale: bool = False  # one scale for all hops, same bits; only e4m3 has the range for it

    def __post_init__(self):
        if not isinstance(self.shared_scale, bool):
            raise ValueError(
                f"shared_scale={self.shared_scale!r} is not a flag. Give True or False."
            )

    @property
    @abc.abstractmethod
    def _format(self) -> Element:
        """Format of the elements."""

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`. Shared scales are reduced and gathered: twice (n - 1)/n of a byte a
        block, as many as they cost in the messages.
        """
        rows = rows_per_chunk(size, num_chunks)
        codes, scales = rows * packing.row_bytes(self._format.bits), rows * _BLOCKS
        if not self.shared_scale:
            return WireCost(payload_bytes=codes + scales, statistics_bytes=0)
        statistics = 2 * (num_workers - 1) * (num_chunks // num_workers) * scales
        return WireCost(payload_bytes=codes, statistics_bytes=statistics)

    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> RecodedChunks:
        """See `ChunkedMethod`."""
        values = as_row_chunks(flat, num_chunks)
        if not self.shared_scale:
            return _rescaled_chunks(self._format, values=values, size=flat.size)
        scales = self._shared_scales(values, axis_name, num_workers)
        return _shared_scale_chunks(self._format, scales, values=values, size=flat.size)

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> RecodedChunks:
        """See `ChunkedMethod`. Nothing is summed, so parts always carry scales of their own."""
        return _rescaled_chunks(
            self._format,
            values=part[None],
            size=num_workers * part.size,
            first=lax.axis_index(axis_name),
        )

    def _shared_scales(self, values: Array, axis_name: str, num_workers: int) -> Array:
        """Scales of all workers for float [chunks, chunk size]: uint8 [chunks, rows, blocks]."""
        local = _scales_of(values.astype(jnp.float32), self._format)
        scales = _with_headroom(lax.pmax(local, axis_name), num_workers)
        return scales.reshape(values.shape[0], -1, _BLOCKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(_MX):
    """MXFP8: 8.25 bits a coordinate on the wire.

    Every partial sum gets scales of its own; with `shared_scale` those of the largest value of all
    workers, agreed on first and raised by 1 + ceil(log2 workers) exponents, so that no partial sum
    saturates. That is a range which formats of few exponent bits do not have: over 8 workers the
    vNMSE is 0.6 times as large with e4m3, 9 times with MXFP4 and 40 times with MXINT8. A block that
    holds NaN or Inf is NaN; with `shared_scale`, sums beyond float32 are NaN or Inf.

    >>> MXFP8(element="e5m2").element
    'e5m2'
    >>> MXFP8(element="e3m4")
    Traceback (most recent call last):
    ...
    ValueError: element='e3m4' is not known. Give one of ('e4m3', 'e5m2').
    """

    element: FP8 = "e4m3"  # e5m2 has a bit of mantissa less, and a range that blocks hardly need

    def __post_init__(self):
        super().__post_init__()
        _check_element(self.element, get_args(FP8))

    @property
    def _format(self) -> Element:
        return ELEMENTS[self.element]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP6(_MX):
    """MXFP6: 6.25 bits a coordinate on the wire. Otherwise as `MXFP8`."""

    element: FP6 = "e2m3"  # e3m2 has a bit of mantissa less, and more range inside a block

    def __post_init__(self):
        super().__post_init__()
        _check_element(self.element, get_args(FP6))

    @property
    def _format(self) -> Element:
        return ELEMENTS[self.element]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(_MX):
    """MXFP4, elements e2m1: 4.25 bits a coordinate on the wire. Otherwise as `MXFP8`."""

    @property
    def _format(self) -> Element:
        return ELEMENTS["e2m1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXINT8(_MX):
    """MXINT8, two's complement in steps of 2^-6: 8.25 bits a coordinate on the wire. Otherwise as
    `MXFP8`.

    Saturates at -127 and 127 steps; the standard allows -128 as well.
    """

    @property
    def _format(self) -> Element:
        return ELEMENTS["int8"]


def _shared_scale_chunks(element: Element, scales: Array, **held: Any) -> RecodedChunks:
    """Codec whose messages are codes alone, under scales that all workers know: uint8 [chunks,
    rows, blocks].
    """

    def of(chunk: Array) -> Array:
        return lax.dynamic_index_in_dim(scales, chunk, keepdims=False)

    return RecodedChunks(
        encode=lambda values, chunk, turn: _encode(values, of(chunk), element),
        decode=lambda codes, chunk: _decode(codes, of(chunk), element),
        **held,
    )


def _rescaled_chunks(element: Element, **held: Any) -> RecodedChunks:
    """Codec whose messages end in the scales of what they hold."""

    def encode(values: Array, chunk: Array, turn: Array | int) -> Array:
        scales = _scales_of(values, element)
        return jnp.concatenate([_encode(values, scales, element), scales.reshape(-1)])

    def decode(payload: Array, chunk: Array) -> Array:
        rows = payload.size // (packing.row_bytes(element.bits) + _BLOCKS)
        codes, scales = jnp.split(payload, [rows * packing.row_bytes(element.bits)])
        return _decode(codes, scales.reshape(rows, _BLOCKS), element)

    return RecodedChunks(encode=encode, decode=decode, **held)


def _encode(values: Array, scales: Array, element: Element) -> Array:
    """float32 [256 rows] under scales uint8 [rows, blocks], to packed codes: uint8 [bytes]."""
    blocks = values.reshape(*scales.shape, BLOCK_SIZE)

    # In a loop, whose codes wait in memory: fused with the packing, XLA:CPU rounds again for every
    # plane, and MXFP6 takes six times as long.
    def step(first: Array | int, count: int, codes: Array) -> Array:
        part = lax.dynamic_slice_in_dim(blocks, first, count)
        part_scales = lax.dynamic_slice_in_dim(scales, first, count)
        part_codes = minifloat.encode(part, part_scales[:, :, None], element)
        return lax.dynamic_update_slice_in_dim(codes, part_codes, first, axis=0)

    empty = compat.match_varying(jnp.zeros(blocks.shape, jnp.uint16), values)
    codes = for_each_block(blocks.shape[0], step, empty)
    planes = packing.pack(codes.reshape(-1, SUPER_GROUP_SIZE), element.bits)
    return jnp.concatenate([plane.reshape(-1) for plane in planes])


def _decode(packed: Array, scales: Array, element: Element) -> Array:
    """Inverse of `_encode` up to rounding: float32 [256 rows]."""
    rows = scales.shape[0]
    sizes = [rows * packing.row_bytes(bits) for bits in packing.planes(element.bits)]
    planes = jnp.split(packed, np.cumsum(sizes)[:-1])
    # Codes come as [rows, blocks, block size]: an eighth of a row is a block.
    codes = packing.unpack(tuple(planes), rows, element.bits)
    return minifloat.decode(codes, scales[:, :, None], element).reshape(-1)


def _scales_of(values: Array, element: Element) -> Array:
    """Scales of the blocks of float32 values, a multiple of 256 of them: uint8 [rows, blocks]."""
    maxima = group_maxima(values.reshape(-1, SUPER_GROUP_SIZE), BLOCK_SIZE)
    return minifloat.block_scales(maxima, element)


def _with_headroom(scales: Array, num_workers: int) -> Array:
    """Largest scales of all workers, raised so that no partial sum of their values saturates.

    All values are below 2^(emax + 1) scales, partial sums below as many times that as there are
    workers, and rounding crosses no power of two. So 2^emax has to hold what the next power of two
    of workers adds up to. A scale beyond 2^127 becomes NaN, as the sum may be beyond float32.
    """
    exponents = 1 + (num_workers - 1).bit_length()  # of two, and of the workers
    raised = scales.astype(jnp.int32) + exponents
    return jnp.minimum(raised, NAN_SCALE).astype(jnp.uint8)


def _check_element(element: str, known: tuple[str, ...]) -> None:
    if element not in known:
        raise ValueError(f"element={element!r} is not known. Give one of {known}.")
