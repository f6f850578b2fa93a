"""Ring: n - 1 exchanges between neighbors, each of which adds a worker to the partial sum."""

import dataclasses

import jax
from jax import Array, lax

from dynamiq_jax._core import Axis, ChunkCodec, Payload, check_flag
from dynamiq_jax.topologies._base import Arrival, Topology
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Topology):
    """Traffic between neighbors only, n compressions on a coordinate's path.

    Chunk c starts at worker c + 1 and ends at worker c.
    """

    unroll: bool = False  # steps without a loop, so that a backward pass can run under them

    is_far = False

    def __post_init__(self):
        check_flag("unroll", self.unroll)

    @override
    def arrival(self, codec: ChunkCodec, axis: Axis) -> Arrival:
        last = axis.size - 1
        return Arrival(_received(self._walk(codec, axis, last), axis), _chunk(axis, last), last)

    @override
    def summed(self, codec: ChunkCodec, axis: Axis) -> Payload:
        # In the loop, the last hop is compiled once, together with all earlier ones.
        return self._walk(codec, axis, axis.size)

    @override
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        return [(1, workers) for workers in range(1, num_workers + 1)]

    @override
    def steps(self, num_workers: int) -> int:
        return num_workers - 1

    @property
    @override
    def is_loop(self) -> bool:
        return not self.unroll

    def _walk(self, codec: ChunkCodec, axis: Axis, turns: int) -> Payload:
        """Return the payload after `turns` compressions: the sum of `turns` workers."""

        def step(turn: Index, sent: Payload) -> Payload:
            return codec.hop(_received(sent, axis), _chunk(axis, turn), turn)

        payload = codec.compress(_chunk(axis, 0), 0)
        if not self.unroll:
            return lax.fori_loop(1, turns, step, payload)
        for turn in range(1, turns):  # each may change the shapes
            payload = step(turn, payload)
        return payload


def _received(sent: Payload, axis: Axis) -> Payload:
    return jax.tree.map(lambda leaf: leaf[None], axis.shift(sent, 1))


def _chunk(axis: Axis, turn: Index) -> Array:
    return (axis.index - (turn + 1)) % axis.size
