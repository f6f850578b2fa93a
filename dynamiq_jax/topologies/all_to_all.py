"""All-to-all: every worker sends every other one its values of the chunk that the other owns."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.chunks import ChunkCodec
from dynamiq_jax.topologies.base import Arrival, Gathered, Topology, gather


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllToAll(Topology):
    """Two compressions on a coordinate's path: the lowest error, hardly more with more workers.

    One step, in which everybody talks to everybody: for networks that carry that at full speed.
    """

    def all_reduce(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> Gathered:
        """See `Topology`. The errors of many workers' own values average out, and that of the sums
        is left: so these have a codec of their own.
        """
        sums = codec.for_sums(num_workers)
        arrivals = self.arrivals(codec, axis_name, num_workers)
        return gather(sums, tuple(sums.hop(*arrival) for arrival in arrivals), axis_name)

    def arrivals(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> tuple[Arrival, ...]:
        """See `Topology`."""
        worker = lax.axis_index(axis_name)
        turns = jnp.arange(num_workers - 1, dtype=worker.dtype)
        others = (worker + 1 + turns) % num_workers
        payloads = lax.map(lambda args: codec.compress(*args), (others, turns))

        def exchange(leaf: Array) -> Array:
            by_owner = jnp.zeros((num_workers, *leaf.shape[1:]), leaf.dtype)
            by_owner = compat.match_varying(by_owner, leaf).at[others].set(leaf)
            by_sender = lax.all_to_all(by_owner, axis_name, split_axis=0, concat_axis=0)
            return by_sender[others]

        received = jax.tree.map(exchange, payloads)
        return (Arrival(received, worker, num_workers - 1),)

    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        """See `Topology`."""
        return [(num_workers - 1, 1), (1, num_workers)]

    def steps(self, num_workers: int) -> int:
        """See `Topology`."""
        return 1
