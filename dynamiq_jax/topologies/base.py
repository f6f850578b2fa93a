"""What a topology is: how chunks travel. It moves payloads that it cannot read."""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax import compat
from dynamiq_jax.chunks import ChunkCodec, Payload, SumCodec


class Arrival(NamedTuple):
    """The last messages of a chunk that this worker owns: with its own values they make the sum."""

    messages: Payload  # stacked on a leading axis
    chunk: Array
    turn: Array | int  # of the compression of the sum


class Gathered(NamedTuple):
    """All chunks, as they have travelled to every worker."""

    payloads: Payload  # stacked on a leading axis
    codec: SumCodec  # that reads them

    def decode(self) -> Array:
        """Their values, float32 [size], the same bits on all workers."""
        return self.codec.decompress(self.payloads)

    @property
    def arrived(self) -> Array:
        """A vector that is there as soon as the payloads are, before these are decoded."""
        ends = [leaf.reshape(-1)[:1].astype(jnp.float32) for leaf in jax.tree.leaves(self.payloads)]
        return jnp.concatenate(ends).sum(keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology(abc.ABC):
    """How chunks travel between the workers of one axis.

    Worker w owns the chunks from w * chunks_per_worker on: their sums end there. An all-reduce
    compresses them, and gathers the bytes; every worker, the owner too, decodes the same bytes, so
    that all replicas hold the same bits.
    """

    @abc.abstractmethod
    def arrivals(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> tuple[Arrival, ...]:
        """Everything up to the last transfer, for each chunk that the worker owns."""

    @abc.abstractmethod
    def steps(self, num_workers: int) -> int:
        """Transfers that follow one another before the gather, each of which pays the latency."""

    @abc.abstractmethod
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        """What is compressed of one chunk: (how many partial sums, of how many workers each)."""

    @property
    def chunks_per_worker(self) -> int:
        """Chunks that each worker owns."""
        return 1

    @property
    def is_far(self) -> bool:
        """Whether workers send to others than their neighbours, through all of the network."""
        return True

    def supports(self, num_workers: int) -> bool:
        """Whether the topology works for an axis size. Override this alone: `check` asks it."""
        return True

    def check(self, num_workers: int) -> None:
        """Raises ValueError for an axis size that `supports` does not accept."""
        if self.supports(num_workers):
            return
        below = next((n for n in range(num_workers - 1, 1, -1) if self.supports(n)), None)
        above = next((n for n in range(num_workers + 1, 2 * num_workers) if self.supports(n)), None)
        sizes = " or ".join(str(n) for n in (below, above) if n is not None)
        raise ValueError(
            f"topology={self!r} does not support an axis of {num_workers} workers. Give "
            + (f"an axis of a size that it supports, such as {sizes}, or " if sizes else "")
            + "topology='ring' or 'all_to_all', which support every size."
        )

    def num_chunks(self, num_workers: int) -> int:
        """Chunks that a bucket is cut into: as many for each worker."""
        return num_workers * self.chunks_per_worker

    def payloads_scattered(self, num_workers: int) -> int:
        """Payloads of one chunk that each worker sends up to the arrivals: one for each chunk that
        another worker owns. No topology can do with fewer.
        """
        return (num_workers - 1) * self.chunks_per_worker

    def payloads_sent(self, num_workers: int) -> int:
        """Payloads that each worker sends in an all-reduce: as many again to gather the sums."""
        return 2 * self.payloads_scattered(num_workers)

    def all_reduce(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> Gathered:
        """Everything up to the payloads of all sums, on all workers."""
        return gather(codec, self.sums(codec, axis_name, num_workers), axis_name)

    def reduce_scatter(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> Array:
        """Sum of the chunks that the worker owns, float32 [coordinates], never compressed."""
        arrivals = self.arrivals(codec, axis_name, num_workers)
        return jnp.concatenate([codec.accumulate(a.messages, a.chunk) for a in arrivals])

    def sums(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> tuple[Payload, ...]:
        """Payloads of the sums of the chunks that the worker owns."""
        return tuple(
            codec.hop(*arrival) for arrival in self.arrivals(codec, axis_name, num_workers)
        )


def gather(codec: SumCodec, mine: tuple[Payload, ...], axis_name: str) -> Gathered:
    """Payloads of the worker's own chunks to those of all chunks."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *mine)
    gathered = jax.tree.map(lambda leaf: compat.all_gather(leaf, axis_name), stacked)
    return Gathered(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), gathered), codec)
