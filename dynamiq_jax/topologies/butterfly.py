"""Butterfly: recursive halving. Partners exchange half of what they still sum, log2 n times."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.chunks import ChunkCodec, Payload
from dynamiq_jax.topologies.base import Arrival, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Butterfly(Topology):
    """log2 n + 1 compressions on a coordinate's path, for axes of a power of two.

    At distance d, n/2 down to 1, a worker sends its partner (its own number XOR d) the partial sums
    of the d chunks around the partner, and keeps those of the d around itself. It keeps the
    messages, not the sums: what it sends next is decoded from all of them again, which moves fewer
    bytes of memory than a float32 partial sum does, and rounds nothing in between.
    """

    def arrivals(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> tuple[Arrival, ...]:
        """See `Topology`."""
        worker = lax.axis_index(axis_name)
        kept = None  # messages [messages, chunks, ...] of the chunks that the worker still sums
        block = jnp.zeros_like(worker)  # the first of these chunks

        def partial_sum(chunk: Array, messages: Payload | None) -> Payload:
            turn = num_workers - 1 - (worker ^ chunk)
            if messages is None:
                return codec.compress(chunk, turn)
            return codec.hop(messages, chunk, turn)

        distance = num_workers // 2
        while distance:
            mine, theirs = (w // distance * distance for w in (worker, worker ^ distance))
            chunks = theirs + jnp.arange(distance, dtype=worker.dtype)
            by_chunk = jax.tree.map(
                lambda leaf: jnp.swapaxes(leaf, 0, 1), _part(kept, theirs - block, distance)
            )
            sent = lax.map(lambda args: partial_sum(*args), (chunks, by_chunk))
            to = [(source, source ^ distance) for source in range(num_workers)]
            arrived = jax.tree.map(lambda leaf: leaf[None], lax.ppermute(sent, axis_name, to))
            kept = _part(kept, mine - block, distance)
            kept = arrived if kept is None else jax.tree.map(_append, kept, arrived)
            block, distance = mine, distance // 2
        last = jax.tree.map(lambda leaf: leaf[:, 0], kept)
        return (Arrival(last, worker, num_workers - 1),)

    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        """See `Topology`."""
        halves = [2**step for step in range(self.steps(num_workers))]
        return [(num_workers // (2 * half), half) for half in halves] + [(1, num_workers)]

    def steps(self, num_workers: int) -> int:
        """See `Topology`."""
        return num_workers.bit_length() - 1

    def supports(self, num_workers: int) -> bool:
        """See `Topology`: a power of two."""
        return num_workers & (num_workers - 1) == 0


def _part(messages: Payload, first: Array, chunks: int) -> Payload:
    return jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, first, chunks, axis=1), messages
    )


def _append(kept: Array, arrived: Array) -> Array:
    return jnp.concatenate([kept, arrived])
