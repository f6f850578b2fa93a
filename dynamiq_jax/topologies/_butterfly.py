"""Butterfly: recursive halving. In each of log2 n turns, partners exchange half of their chunks."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import Axis, ChunkCodec, Payload
from dynamiq_jax.topologies._base import Arrival, Topology
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Butterfly(Topology):
    """log2 n + 1 compressions on a coordinate's path, for axes of a power of two.

    The distance d goes from n/2 down to 1. In each turn, a worker sends its partner (its own index
    XOR d) the partial sums of the d chunks around the partner, and keeps the partial sums of the d
    chunks around itself. It keeps messages instead of float32 sums, and decodes them again for the
    next message. So it moves fewer bytes of memory, and rounds nothing in between.
    """

    @override
    def arrival(self, codec: ChunkCodec, axis: Axis) -> Arrival:
        worker = axis.index
        kept = None  # messages [messages, chunks, ...] of the chunks that the worker still sums
        block = jnp.zeros_like(worker)  # the first of these chunks

        def partial_sum(chunk: Array, messages: Payload | None) -> Payload:
            turn = axis.size - 1 - (worker ^ chunk)
            if messages is None:
                return codec.compress(chunk, turn)
            return codec.hop(messages, chunk, turn)

        distance = axis.size // 2
        while distance:
            mine, theirs = (w // distance * distance for w in (worker, worker ^ distance))
            chunks = theirs + jnp.arange(distance, dtype=worker.dtype)
            by_chunk = jax.tree.map(
                lambda leaf: jnp.swapaxes(leaf, 0, 1), _part(kept, theirs - block, distance)
            )
            sent = lax.map(lambda args: partial_sum(*args), (chunks, by_chunk))
            arrived = jax.tree.map(lambda leaf: leaf[None], axis.swap(sent, distance))
            kept = _part(kept, mine - block, distance)
            if kept is None:
                kept = arrived
            else:
                kept = jax.tree.map(lambda *both: jnp.concatenate(both), kept, arrived)
            block, distance = mine, distance // 2
        last = jax.tree.map(lambda leaf: leaf[:, 0], kept)
        return Arrival(last, worker, axis.size - 1)

    @override
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        halves = [2**step for step in range(self.steps(num_workers))]
        return [(num_workers // (2 * half), half) for half in halves] + [(1, num_workers)]

    @override
    def steps(self, num_workers: int) -> int:
        return num_workers.bit_length() - 1

    @override
    def supports(self, num_workers: int) -> bool:
        return num_workers & (num_workers - 1) == 0


def _part(messages: Payload, first: Array, chunks: int) -> Payload:
    return jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, first, chunks, axis=1), messages
    )
