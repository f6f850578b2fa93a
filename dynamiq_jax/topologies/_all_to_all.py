"""All-to-all: every worker sends every other one its values of the chunk that the other owns."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import Axis, ChunkCodec
from dynamiq_jax.topologies._base import Arrival, FixedTopology, Gathered, gather
from pallas_kernels import compat
from pallas_kernels.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllToAll(FixedTopology):
    """Two compressions on a coordinate's path, and one step.

    The error hardly grows with the workers, and is the lowest in one bucket or in striped ones. All
    workers send to all others at once: for networks that carry this at full speed.
    """

    @override
    def all_reduce(self, codec: ChunkCodec, axis: Axis) -> Gathered:
        # The errors of many workers' own values average out. What remains is the error of the
        # compressed sum, so this has a codec of its own.
        sums = codec.of_sums(axis.size)
        arrivals = self.arrivals(codec, axis)
        return gather(sums, tuple(sums.hop(*arrival) for arrival in arrivals), axis)

    @override
    def arrivals(self, codec: ChunkCodec, axis: Axis) -> tuple[Arrival, ...]:
        worker = axis.index
        turns = jnp.arange(axis.size - 1, dtype=worker.dtype)
        others = (worker + 1 + turns) % axis.size
        payloads = lax.map(lambda args: codec.compress(*args), (others, turns))

        def exchange(leaf: Array) -> Array:
            by_owner = jnp.zeros((axis.size, *leaf.shape[1:]), leaf.dtype)
            by_owner = compat.match_varying(by_owner, leaf).at[others].set(leaf)
            return axis.exchange(by_owner)[others]

        received = jax.tree.map(exchange, payloads)
        return (Arrival(received, worker, axis.size - 1),)

    @override
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        return [(num_workers - 1, 1), (1, num_workers)]

    @property
    @override
    def has_static_turns(self) -> bool:
        return True

    @override
    def steps(self, num_workers: int) -> int:
        return 1
