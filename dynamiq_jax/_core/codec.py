"""Interface between methods and topologies: a bucket in chunks, equally many for each worker.

A topology moves opaque payloads, which a `ChunkCodec` makes and decodes. Several payloads are one
tree, stacked on a leading axis.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._jax.compat import override
from pallas_kernels.codec import Index
from pallas_kernels.copies import pad

Payload = Any  # pytree of arrays: one chunk on the wire in one hop

# Coordinates of a bucket, and bytes of all of its messages together. Programs compute an index into
# either as int32: coordinates in samples of the error, in shards and in lists of single ones, and
# bytes where the message of a chunk starts. The last eighth of 2^31 is for padding: less than 512
# coordinates for each chunk, which is a 64th with 65,536 of them, and what a method adds to fill up
# its own blocks, a 16th in THC. All other indices count something larger, of which there are fewer:
# rows of 256, units of 32 bytes of one message, chunks, places in the first dimension of a leaf.
MOST_IN_BUCKET = 7 * 2**28


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Static bytes of a method for one bucket."""

    payload_bytes: int  # one message: one chunk, one hop; that of a sum, if they differ by turn
    statistics_bytes: int = 0  # sent by each worker before the first payload

    def bytes_scattered(self, payloads: int) -> int:
        """Return the bytes of the payloads that a worker sends up to the sums.

        A method whose messages differ by turn returns a cost of its own class.
        """
        return payloads * self.payload_bytes

    def __add__(self, other: "WireCost") -> "WireCost":
        """Return the bytes of two buckets that travel in the same turns."""
        return WireCost(
            self.payload_bytes + other.payload_bytes, self.statistics_bytes + other.statistics_bytes
        )


class SumCodec(abc.ABC):
    """The last two steps of an all-reduce: encoding of a sum by its owner, decoding by all."""

    @abc.abstractmethod
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Payload:
        """Return the payload of received partial sums of a chunk, stacked, plus the local values.

        Law: it is the payload of the sum, as if a worker held it, up to one rounding.

        Args:
          payloads: received payloads, stacked on a leading axis.
          turn: number of this compression of the chunk, from 0. It differs between any two
            compressions of a chunk on all workers, so that rounding errors can cancel.
        """

    @abc.abstractmethod
    def decompress(self, payloads: Payload) -> Array:
        """Decode the payloads of all chunks, stacked on a leading axis: float32 [size].

        Law: it reads nothing but the payloads and what all workers know, so that it returns the
        same bits on all of them.
        """


class ChunkCodec(SumCodec):
    """One bucket of one collective on one worker, in the chunks of the topology.

    The laws of its methods, of two workers with two chunks each of 256 values, whose payloads hold
    bfloat16:

    >>> from dynamiq_jax.methods import BF16, Axis, Call
    >>> from dynamiq_jax.topologies import Ring
    >>> call, values = Call(size=512, axis=Axis("data", 2), topology=Ring()), jnp.arange(512.0) % 8
    >>> codec = BF16().bind(values, call, jax.random.key(0))
    >>> own = jnp.stack([codec.compress(chunk, 0) for chunk in jnp.arange(2)])
    >>> bool((codec.decompress(own) == codec.rounded(0)[0]).all())
    True
    >>> sums = jnp.stack([codec.hop(own[c : c + 1], jnp.int32(c), 1) for c in range(2)])
    >>> bool((codec.decompress(sums) == 2 * values).all())  # with a worker of the same values
    True
    >>> bool((codec.accumulate(own[:1], jnp.int32(0)) == 2 * values[:256]).all())
    True
    """

    @abc.abstractmethod
    def compress(self, chunk: Array, turn: Index) -> Payload:
        """Return the payload of the local values of a chunk; `turn` as for `hop`.

        Law: it is `hop` without a received payload.
        """

    @abc.abstractmethod
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        """Sum received partial sums of a chunk and the local values: float32 [chunk size].

        Law: the values that `hop` encodes, before they are rounded.

        Only where chunks hold consecutive coordinates, as in a reduce-scatter.
        """

    @abc.abstractmethod
    def rounded(self, turn: Index) -> "tuple[Array, ChunkCodec]":
        """Compress and decode the local values of all chunks.

        Law: the values are those that `decompress` returns of the payloads of `compress`.

        Returns:
          The decoded values, float32 [size], and a codec that carries these instead. Error feedback
          keeps the difference from the original values.
        """

    def metrics(self) -> Mapping[str, Array]:
        """Return what the codec knows of the bucket: see `Method.details`."""
        return {}

    def of_sums(self, num_workers: int) -> SumCodec:
        """Return a codec that encodes the sum of all workers with less error.

        It takes another pass over the values. Topologies use it where this one compression is most
        of the error. Payloads have the same size, but only its own `decompress` reads them.
        """
        return self


@dataclasses.dataclass(frozen=True)
class LocalChunks:
    """The chunks of a bucket that a worker holds."""

    values: Array  # float [chunks, chunk size], padded with zeros
    size: int  # coordinates of the whole bucket, before padding
    first: Index = 0  # index of the first of these chunks

    def at(self, chunk: Array) -> Array:
        """Return the values of a chunk, float32 [chunk size]."""
        return take_chunk(self.values, chunk - self.first).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecodedChunks(ChunkCodec):
    """Codec of methods that turn values into bytes and back at each hop."""

    local: LocalChunks
    encode: Callable[[Array, Array, Index], Payload]  # (float32 [chunk size], chunk, turn)
    decode: Callable[[Payload, Array], Array]  # (payload, chunk) to float32 [chunk size]

    @override
    def compress(self, chunk: Array, turn: Index) -> Payload:
        return self.encode(self.local.at(chunk), chunk, turn)

    @override
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Payload:
        return self.encode(self.accumulate(payloads, chunk), chunk, turn)

    @override
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        total = self.local.at(chunk)
        for message in range(_length(payloads)):
            one = jax.tree.map(lambda leaf, m=message: leaf[m], payloads)
            total = total + self.decode(one, chunk)
        return total

    @override
    def decompress(self, payloads: Payload) -> Array:
        values = jax.vmap(self.decode)(payloads, jnp.arange(_length(payloads), dtype=jnp.int32))
        return values.reshape(-1)[: self.local.size]

    @override
    def rounded(self, turn: Index) -> "tuple[Array, RecodedChunks]":
        chunks = jnp.arange(len(self.local.values), dtype=jnp.int32)
        values = lax.map(lambda chunk: self.decode(self.compress(chunk, turn), chunk), chunks)
        local = dataclasses.replace(self.local, values=values)
        return values.reshape(-1)[: local.size], dataclasses.replace(self, local=local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedChunks(ChunkCodec):
    """Codec whose hops add the local payload to the received ones, without decoding."""

    encoded: Array  # numbers that are added, [chunks, ...], of the chunks from `first` on
    decode: Callable[[Array, Array | None], Array]  # (sums [chunks, ...], their index or None for
    # all chunks) to float32 values, flat: linear, and defined for float32 sums too
    size: int  # coordinates of the bucket, before padding
    first: Index = 0
    pack: Callable[[Array], Payload] = lambda numbers: numbers  # of one chunk
    unpack: Callable[[Payload], Array] = lambda payloads: payloads  # of stacked payloads

    @override
    def compress(self, chunk: Array, turn: Index) -> Payload:
        return self.pack(self._local(chunk))

    @override
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Payload:
        return self.pack(self._sum(payloads, chunk))

    @override
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        return self.decode(self._sum(payloads, chunk)[None], chunk)

    @override
    def decompress(self, payloads: Payload) -> Array:
        return self.decode(self.unpack(payloads), None)[: self.size]

    @override
    def rounded(self, turn: Index) -> "tuple[Array, SummedChunks]":
        # Sums are of what is encoded: there is no other loss.
        return self.decode(self.encoded, None)[: self.size], self

    def _local(self, chunk: Array) -> Array:
        return take_chunk(self.encoded, chunk - self.first)

    def _sum(self, payloads: Payload, chunk: Array) -> Array:
        received = self.unpack(payloads)
        return self._local(chunk) + jnp.sum(received, axis=0, dtype=received.dtype)


def take_chunk(chunks: Array, index: Array) -> Array:
    """Return one of several chunks, [...] of [chunks, ...]."""
    return lax.dynamic_index_in_dim(chunks, index, keepdims=False)


def as_chunks(flat: Array, num_chunks: int, multiple_of: int = 1) -> Array:
    """Reshape a vector [size] to [num_chunks, chunk size], padded with zeros.

    The chunk size is a multiple of `multiple_of`.
    """
    size = flat.size + -flat.size % (num_chunks * multiple_of)
    return pad(flat, size).reshape(num_chunks, -1)


def _length(stacked: Payload) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]
