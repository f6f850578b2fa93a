"""Terms of messages: what a lost packet takes along, and what is left of a sum without it.

Codecs decode whole messages. Here they are split into terms, each of which depends on some bytes. A
sum of the terms that arrived, weighted, becomes values again.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import dynamiq_jax as dq
from dynamiq_jax.methods import (
    BlockwiseMethod,
    ChunkCodec,
    ChunkedMethod,
    RecodedChunks,
    SummedChunks,
)
from dynamiq_jax.parts import Payload, override, take_chunk
from dynamiq_research.packet_loss.spans import ByteSpans
from dynamiq_research.thc import THC
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, packing, restore_rows, row_bytes
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.packing import MAX_WIDTH


class Terms(abc.ABC):
    """Terms of messages of one worker each, in a reduce-scatter.

    Together the methods are `ChunkCodec.accumulate`: the values of the local terms plus the terms
    of all messages. A lost term is left out of this sum.
    """

    @abc.abstractmethod
    def local_terms(self, chunk: Array) -> Array:
        """Return the terms of the local values of a chunk, float32 [terms]."""

    @abc.abstractmethod
    def terms(self, payload: Payload, chunk: Array) -> Array:
        """Decode a message of one worker's values to its terms, float32 [terms]."""

    def values_of_terms(self, terms: Array, chunk: Array) -> Array:
        """Return the values of a weighted sum of terms: float32 [chunk size], linear in them."""
        return terms

    def byte_spans(self, chunk: Array) -> ByteSpans | None:
        """Return the bytes of a message that each group of terms depends on.

        None says that every term depends on every byte.
        """
        return None


def terms_of(method: ChunkedMethod, codec: ChunkCodec) -> Terms:
    """Return the terms of a method's messages; `codec` is what the method's `bind` returned.

    Raises:
      ValueError: the messages of the method cannot be decoded one by one.
    """
    if isinstance(codec, Terms):
        return codec
    if isinstance(method, dq.DynamiQ):
        return _DynamiQTerms(codec)
    if isinstance(codec, RecodedChunks):
        return _RecodedTerms(codec, _sections(method, codec, codec.local.values.shape[1]))
    if isinstance(codec, SummedChunks):
        return _SummedTerms(codec, _sections(method, codec, codec.encoded[0].size))
    raise ValueError(
        f"method={method!r} has messages that cannot be decoded in parts. Give another method, "
        "such as dq.DynamiQ() or dq.methods.BF16(), or make its codec a "
        "dynamiq_research.packet_loss.Terms."
    )


@dataclasses.dataclass(frozen=True)
class _Sections:
    """Sections of a message, each of which holds group after group."""

    groups: int
    group_bytes: tuple[int, ...]  # of a group in each section

    def spans(self) -> ByteSpans:
        return ByteSpans.of_sections(self.groups, self.group_bytes)


def _sections(method: ChunkedMethod, codec: ChunkCodec, chunk_size: int) -> _Sections | None:
    """Return the sections of the messages of a method, or None if they are not known."""
    rows = chunk_size // SUPER_GROUP_SIZE
    if isinstance(method, dq.methods.Exact):
        return _Sections(chunk_size, (4,))
    if isinstance(method, dq.methods.BF16):
        return _Sections(chunk_size, (2,))
    if isinstance(method, BlockwiseMethod):
        codes = tuple(row_bytes(bits) for bits in packing.planes(method.format.bits))
        sides = tuple(method.format.blocks * count for count in method.format.side_bytes)
        # Scales that all workers share are in no message.
        has_sides = _message_bytes(codec) > rows * sum(codes)
        return _Sections(rows, codes + sides if has_sides else codes)
    if isinstance(method, THC):
        width = 8 * _message_bytes(codec) // chunk_size
        return _Sections(rows, tuple(row_bytes(bits) for bits in packing.planes(width)))
    return None


def _message_bytes(codec: ChunkCodec) -> int:
    message = jax.eval_shape(lambda: codec.compress(jnp.int32(0), 0))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(message))


@dataclasses.dataclass(frozen=True)
class _RecodedTerms(Terms):
    """Terms that are the values themselves."""

    codec: RecodedChunks
    sections: _Sections | None

    @override
    def local_terms(self, chunk: Array) -> Array:
        return self.codec.local.at(chunk)

    @override
    def terms(self, payload: Payload, chunk: Array) -> Array:
        return self.codec.decode(payload, chunk)

    @override
    def byte_spans(self, chunk: Array) -> ByteSpans | None:
        return None if self.sections is None else self.sections.spans()


@dataclasses.dataclass(frozen=True)
class _SummedTerms(Terms):
    """Terms that are the numbers which hops add."""

    codec: SummedChunks
    sections: _Sections | None

    @override
    def local_terms(self, chunk: Array) -> Array:
        encoded = take_chunk(self.codec.encoded, chunk - self.codec.first)
        return encoded.reshape(-1).astype(jnp.float32)

    @override
    def terms(self, payload: Payload, chunk: Array) -> Array:
        stacked = jax.tree.map(lambda leaf: leaf[None], payload)
        return self.codec.unpack(stacked).reshape(-1).astype(jnp.float32)

    @override
    def values_of_terms(self, terms: Array, chunk: Array) -> Array:
        return self.codec.decode(terms.reshape(1, *self.codec.encoded.shape[1:]), chunk)

    @override
    def byte_spans(self, chunk: Array) -> ByteSpans | None:
        return None if self.sections is None else self.sections.spans()


@dataclasses.dataclass(frozen=True)
class _DynamiQTerms(Terms):
    """Terms of DynamiQ: the values, in rows of 256 that lie in several places of a message."""

    codec: Any  # of DynamiQ: local rows and their places, and the layout of messages

    @override
    def local_terms(self, chunk: Array) -> Array:
        rows = self.codec.layout.rows_per_chunk
        of_chunk = lax.dynamic_slice_in_dim(self.codec.local.rows, chunk * rows, rows)
        return of_chunk.reshape(-1).astype(jnp.float32)

    @override
    def terms(self, payload: Payload, chunk: Array) -> Array:
        local = self.codec.local._replace(rows=jnp.zeros_like(self.codec.local.rows))
        alone: ChunkCodec = dataclasses.replace(self.codec, local=local)
        return alone.accumulate(payload[None], chunk)

    @override
    def byte_spans(self, chunk: Array) -> ByteSpans:
        layout, places = self.codec.layout, self.codec.local.places.at(chunk)
        order = places.order - chunk * layout.rows_per_chunk
        ends = _row_ends(layout, places.widths, places.starts)
        starts, stops = (restore_rows(of_places, order) for of_places in ends)
        return ByteSpans(starts, stops, layout.payload_bytes)


def _row_ends(layout: Layout, widths: Array, plane_starts: Array) -> tuple[Array, Array]:
    """Return where the bytes of each place of a chunk start and stop: int32 [R, 18] each.

    These are its units in planes 0 to 15, its group scales and its super-scale. Bytes that it does
    not need stop where they start: planes from its width on, and group scales at width 0.
    (docs/wire_format.md)

    Args:
      layout: layout of the messages.
      widths: widths of the places, int32 [R].
      plane_starts: where every plane starts, in units: int32 [16 or more].
    """
    place = lax.broadcasted_iota(jnp.int32, (layout.rows_per_chunk, 1), 0)
    has_plane = widths[:, None] > np.arange(MAX_WIDTH, dtype=np.int32)[None, :]
    starts = [
        UNIT * (plane_starts[None, :MAX_WIDTH] + place),
        layout.group_scales_start + place * layout.groups,
        layout.super_scales_start + place * 2,
    ]
    sizes = [
        jnp.where(has_plane, np.int32(UNIT), np.int32(0)),
        jnp.where(widths[:, None] > 0, np.int32(layout.groups), np.int32(0)),
        jnp.full_like(place, 2),
    ]
    first = jnp.concatenate(starts, axis=1)
    return first, first + jnp.concatenate(sizes, axis=1)
