"""Ring: n - 1 exchanges between neighbors, each of which adds a worker to the partial sum."""

import dataclasses
from collections.abc import Callable

import jax
from jax import Array, lax

from dynamiq_jax._core import Axis, ChunkCodec, Payload, check_flag
from dynamiq_jax.topologies._base import Arrival, Topology
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Topology):
    """Traffic between neighbors only, n compressions on a coordinate's path.

    Chunk c starts at worker c + 1 and ends at worker c. In a bidirectional ring each worker owns
    two chunks of half the size. The second chunk travels in the opposite direction.
    """

    bidirectional: bool = False  # on a GPU, transfers of one way run under kernels of the other
    unroll: bool = False  # steps without a loop, so that a backward pass can run under them

    is_far = False

    def __post_init__(self):
        check_flag("bidirectional", self.bidirectional)
        check_flag("unroll", self.unroll)

    @override
    def arrivals(self, codec: ChunkCodec, axis: Axis) -> tuple[Arrival, ...]:
        if not self.bidirectional:
            way = _Direction(codec, axis, self.unroll)
            return (way.arrival(way.send(way.walk(axis.size - 1))),)
        ways = [_Direction(codec, axis, self.unroll, step=step, of=2) for step in (1, -1)]
        arrived = _walk_both(*ways)
        return tuple(way.arrival(message) for way, message in zip(ways, arrived, strict=True))

    @override
    def sums(self, codec: ChunkCodec, axis: Axis) -> tuple[Payload, ...]:
        if self.bidirectional:
            return super().sums(codec, axis)
        # In the loop, the last hop is compiled once, together with all earlier ones.
        return (_Direction(codec, axis, self.unroll).walk(axis.size),)

    @override
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        return [(1, workers) for workers in range(1, num_workers + 1)]

    @override
    def steps(self, num_workers: int) -> int:
        return num_workers - 1

    @property
    @override
    def chunks_per_worker(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    @override
    def is_loop(self) -> bool:
        return not self.unroll


@dataclasses.dataclass(frozen=True)
class _Direction:
    """One direction of the ring."""

    codec: ChunkCodec
    axis: Axis
    unroll: bool  # no loop over the hops
    step: int = 1  # 1: to the next worker, -1: to the one before
    of: int = 1  # directions

    def walk(self, turns: int) -> Payload:
        """Return the payload after `turns` compressions, of the values of as many workers."""
        return _repeat(
            turns, lambda turn, sent: self.hop(self.send(sent), turn), self.start(), self.unroll
        )

    def start(self) -> Payload:
        return self.codec.compress(self._chunk(0), 0)

    def send(self, payload: Payload) -> Payload:
        return self.axis.shift(payload, self.step)

    def hop(self, received: Payload, turn: Index) -> Payload:
        return self.codec.hop(_stacked(received), self._chunk(turn), turn)

    def arrival(self, message: Payload) -> Arrival:
        last = self.axis.size - 1
        return Arrival(_stacked(message), self._chunk(last), last)

    def _chunk(self, turn: Index) -> Array:
        owner = (self.axis.index - self.step * (turn + 1)) % self.axis.size
        return owner * self.of + (0 if self.step == 1 else 1)


def _stacked(payload: Payload) -> Payload:
    return jax.tree.map(lambda leaf: leaf[None], payload)


def _walk_both(forward: _Direction, backward: _Direction) -> tuple[Payload, Payload]:
    """Return the last messages of both directions, which are half a step apart.

    While a payload of one direction travels, the payload that arrived last in the other direction
    gets the local values.
    """

    def step(turn: Index, carry: tuple[Payload, Payload]) -> tuple[Payload, Payload]:
        sent, received = carry
        arriving = forward.send(sent)
        returning = backward.send(backward.hop(received, turn))
        return forward.hop(arriving, turn), returning

    carry = forward.start(), backward.send(backward.start())
    sent, received = _repeat(forward.axis.size - 1, step, carry, forward.unroll)
    return forward.send(sent), received


def _repeat(
    turns: int, step: Callable[[Index, Payload], Payload], carry: Payload, unroll: bool
) -> Payload:
    """Run `step` for the turns from 1 on; without a loop, each may change the shapes."""
    if not unroll:
        return lax.fori_loop(1, turns, step, carry)
    for turn in range(1, turns):
        carry = step(turn, carry)
    return carry
