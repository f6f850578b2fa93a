"""What passes between a method and a topology: a bucket in chunks, as many for each worker.

Two families of methods, one interface. A topology moves opaque payloads and asks a `ChunkCodec` for
what it needs: the first payload of a chunk, the payload after received partial sums have been added
(one in a ring, several in a butterfly or an all-to-all), the values of such a sum, and the values
of the final payloads. Several payloads are one tree, stacked on a leading axis. Methods that decode
and encode again at each hop do so in `hop` (`RecodedChunks`); for methods whose encoded form can be
summed directly `hop` is a sum of payloads (`SummedChunks`). A `SumCodec` may encode the final sums
in a way of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

Payload = Any  # pytree of arrays: what one chunk puts on the wire in one hop


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Static bytes of a method for one bucket of one all-reduce."""

    payload_bytes: int  # one message: one chunk, one hop
    statistics_bytes: int  # sent by each worker before the first payload


class SumCodec(Protocol):
    """The last two steps of an all-reduce: the owner makes a payload of the sum, all decode it."""

    def hop(self, payloads: Payload, chunk: Array, turn: Array | int) -> Payload:
        """Payload of received partial sums of a chunk, stacked, plus the local values."""

    def decompress(self, payloads: Payload) -> Array:
        """Payloads of all chunks, stacked on a leading axis, to the sum: float32 [size]."""


class ChunkCodec(SumCodec, Protocol):
    """One bucket of one collective on one worker, in as many chunks as the topology asks for.

    `turn` numbers the compressions of one chunk, from 0, on all workers together: no two of them
    have the same, so that their rounding errors can be made to cancel.
    """

    def compress(self, chunk: Array, turn: Array | int) -> Payload:
        """Payload of the local values of a chunk."""

    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        """Values of the received partial sums of a chunk plus the local ones: float32 [chunk size].

        Only where chunks hold consecutive coordinates (see `ChunkedMethod.bind`).
        """

    def once(self, turn: Array | int, num_workers: int) -> "tuple[Array, ChunkCodec]":
        """Local values after a compression of their own, float32 [size], and a codec that carries
        these instead: what error feedback knows that it has sent. All chunks have to be there.
        """

    def for_sums(self, num_workers: int) -> SumCodec:
        """What makes a payload of the whole sum of many workers with less error, at the price of
        another pass over its values: for topologies where this one compression is most of the
        error. Payloads have the same bytes, but only its own `decompress` reads them.
        """
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecodedChunks(ChunkCodec):
    """Codec of methods that turn values into bytes and back at each hop."""

    values: Array  # float [chunks, chunk size], of the chunks from `first` on
    encode: Callable[[Array, Array, Array | int], Payload]  # (float32 [chunk size], chunk, turn)
    decode: Callable[[Payload, Array], Array]  # (payload, chunk) to float32 [chunk size]
    size: int  # coordinates of the bucket, before padding
    first: Array | int = 0

    def compress(self, chunk: Array, turn: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return self.encode(self._local(chunk), chunk, turn)

    def hop(self, payloads: Payload, chunk: Array, turn: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return self.encode(self.accumulate(payloads, chunk), chunk, turn)

    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        """See `ChunkCodec`."""
        total = self._local(chunk)
        for message in range(_length(payloads)):
            one = jax.tree.map(lambda leaf, m=message: leaf[m], payloads)
            total = total + self.decode(one, chunk)
        return total

    def decompress(self, payloads: Payload) -> Array:
        """See `ChunkCodec`."""
        values = jax.vmap(self.decode)(payloads, jnp.arange(_length(payloads)))
        return values.reshape(-1)[: self.size]

    def once(self, turn: Array | int, num_workers: int) -> "tuple[Array, RecodedChunks]":
        """See `ChunkCodec`."""
        chunks = jnp.arange(self.values.shape[0])
        values = lax.map(lambda chunk: self.decode(self.compress(chunk, turn), chunk), chunks)
        return values.reshape(-1)[: self.size], dataclasses.replace(self, values=values)

    def _local(self, chunk: Array) -> Array:
        values = lax.dynamic_index_in_dim(self.values, chunk - self.first, keepdims=False)
        return values.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedChunks(ChunkCodec):
    """Codec of methods whose encoded form can be summed: a hop adds the local payload to the
    received ones.
    """

    encoded: Payload  # leading axis: the chunks from `first` on
    decode: Callable[[Payload], Array]  # stacked sums to float32 [chunks, chunk size]
    size: int  # coordinates of the bucket, before padding
    first: Array | int = 0

    def compress(self, chunk: Array, turn: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, chunk - self.first, keepdims=False),
            self.encoded,
        )

    def hop(self, payloads: Payload, chunk: Array, turn: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return jax.tree.map(
            lambda local, received: local + jnp.sum(received, axis=0, dtype=received.dtype),
            self.compress(chunk, turn),
            payloads,
        )

    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        """See `ChunkCodec`."""
        total = jax.tree.map(lambda leaf: leaf[None], self.hop(payloads, chunk, 0))
        return self.decode(total).reshape(-1)

    def decompress(self, payloads: Payload) -> Array:
        """See `ChunkCodec`."""
        return self.decode(payloads).reshape(-1)[: self.size]

    def once(self, turn: Array | int, num_workers: int) -> "tuple[Array, SummedChunks]":
        """See `ChunkCodec`. What is encoded is what is summed: it has been compressed already."""
        return self.decompress(self.encoded), self


def _length(stacked: Payload) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def as_chunks(flat: Array, num_chunks: int) -> Array:
    """A bucket [size], padded with zeros, as [num_chunks, chunk size]."""
    return jnp.pad(flat, (0, -flat.size % num_chunks)).reshape(num_chunks, -1)
