"""All-to-all: every worker sends to each owner of a chunk its values of this chunk."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import Axis, ChunkCodec, Payload
from dynamiq_jax.topologies._base import Arrival, Gathered, Topology, gather
from pallas_kernels._jax import compat
from pallas_kernels._jax.compat import override

_LARGEST_INDEX = 2**31 - 1  # int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllToAll(Topology):
    """Two compressions on a coordinate's path, and one step.

    The error hardly grows with the number of workers, and is the lowest in one bucket or in striped
    buckets. All workers send to all others at once, for which the network needs full speed between
    any two workers.
    """

    @override
    def all_reduce(self, codec: ChunkCodec, axis: Axis) -> Gathered:
        # The errors of many workers' own values average out. The error of the compressed sum
        # remains, so the sum has a codec of its own.
        sums = codec.of_sums(axis.size)
        return gather(sums, sums.hop(*self.arrival(codec, axis)), axis)

    @override
    def arrival(self, codec: ChunkCodec, axis: Axis) -> Arrival:
        worker = axis.index

        def send(turn: Array, by_owner: Payload) -> Payload:
            owner = (worker + 1 + turn) % axis.size

            def put(all_payloads: Array, one: Array) -> Array:
                return lax.dynamic_update_slice(all_payloads, one.reshape(-1), (owner * one.size,))

            return jax.tree.map(put, by_owner, codec.compress(owner, turn))

        # Payloads one after the other in a vector: a TPU rearranges an array of several.
        of_one = jax.eval_shape(codec.compress, worker, worker)
        empty = jax.tree.map(
            lambda leaf: compat.match_varying(jnp.zeros(axis.size * leaf.size, leaf.dtype), leaf),
            of_one,
        )
        by_owner = lax.fori_loop(0, axis.size - 1, send, empty)

        def exchange(leaf: Array, one: jax.ShapeDtypeStruct) -> Array:
            received, each, count = axis.exchange(leaf, tiled=True), one.size, axis.size - 1
            if 2 * received.size > _LARGEST_INDEX:  # messages are counted instead of their elements
                received, each = received.reshape(axis.size, one.size), 1
            # In the order of the senders behind this worker.
            twice = jnp.concatenate([received, received])
            others = lax.dynamic_slice_in_dim(twice, (worker + 1) * each, count * each)
            return others.reshape(count, *one.shape)

        received = jax.tree.map(exchange, by_owner, of_one)
        return Arrival(received, worker, axis.size - 1)

    @override
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        return [(num_workers - 1, 1), (1, num_workers)]

    @override
    def steps(self, num_workers: int) -> int:
        return 1
