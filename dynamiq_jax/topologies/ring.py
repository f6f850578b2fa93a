"""Ring: n - 1 exchanges between neighbours, each of which adds a worker to the partial sum."""

import dataclasses

import jax
from jax import Array, lax

from dynamiq_jax.chunks import ChunkCodec, Payload
from dynamiq_jax.topologies.base import Arrival, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Topology):
    """Traffic between neighbours only, n compressions on a coordinate's path.

    Chunk c starts at worker c + 1 and ends at worker c. In a bidirectional ring each worker owns
    two chunks of half the size, and the second goes the other way round.
    """

    bidirectional: bool = False  # one direction's transfer runs under the other's kernel, on a GPU
    unroll: bool = False  # steps without a loop, so that a backward pass can run under them

    def __post_init__(self):
        for name in ("bidirectional", "unroll"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ValueError(f"{name}={value!r} is not possible. Give True or False.")

    def arrivals(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> tuple[Arrival, ...]:
        """See `Topology`."""
        last = num_workers - 1
        if not self.bidirectional:
            way = self._direction(codec, axis_name, num_workers)
            return (way.arrival(way.send(way.walk(last))),)
        ways = [
            _Direction(codec, axis_name, num_workers, self.unroll, step=step, of=2)
            for step in (1, -1)
        ]
        arrived = _walk_both(*ways)
        return tuple(way.arrival(message) for way, message in zip(ways, arrived, strict=True))

    def sums(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> tuple[Payload, ...]:
        """See `Topology`."""
        if self.bidirectional:
            return super().sums(codec, axis_name, num_workers)
        # The last hop is like the others: inside the loop it is not compiled a second time.
        return (self._direction(codec, axis_name, num_workers).walk(num_workers),)

    def _direction(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> "_Direction":
        return _Direction(codec, axis_name, num_workers, self.unroll, step=1)

    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        """See `Topology`."""
        return [(1, workers) for workers in range(1, num_workers + 1)]

    def steps(self, num_workers: int) -> int:
        """See `Topology`."""
        return num_workers - 1

    @property
    def chunks_per_worker(self) -> int:
        """See `Topology`."""
        return 2 if self.bidirectional else 1

    @property
    def is_far(self) -> bool:
        """See `Topology`."""
        return False


@dataclasses.dataclass(frozen=True)
class _Direction:
    """Chunks that go round one way."""

    codec: ChunkCodec
    axis_name: str
    num_workers: int
    unroll: bool  # no loop over the hops
    step: int  # 1: to the next worker, -1: to the one before
    of: int = 1  # directions

    def walk(self, turns: int) -> Payload:
        """Payload after `turns` compressions, of as many workers' values."""
        return lax.fori_loop(
            1,
            turns,
            lambda turn, sent: self.hop(self.send(sent), turn),
            self.start(),
            unroll=self.unroll,
        )

    def start(self) -> Payload:
        return self.codec.compress(self._chunk(0), 0)

    def send(self, payload: Payload) -> Payload:
        n = self.num_workers
        to = [(source, (source + self.step) % n) for source in range(n)]
        return lax.ppermute(payload, self.axis_name, to)

    def hop(self, received: Payload, turn: Array | int) -> Payload:
        return self.codec.hop(_alone(received), self._chunk(turn), turn)

    def arrival(self, message: Payload) -> Arrival:
        last = self.num_workers - 1
        return Arrival(_alone(message), self._chunk(last), last)

    def _chunk(self, turn: Array | int) -> Array:
        owner = (lax.axis_index(self.axis_name) - self.step * (turn + 1)) % self.num_workers
        return owner * self.of + (0 if self.step == 1 else 1)


def _alone(payload: Payload) -> Payload:
    return jax.tree.map(lambda leaf: leaf[None], payload)


def _walk_both(forward: _Direction, backward: _Direction) -> tuple[Payload, Payload]:
    """The last messages of both directions, half a step apart: while one direction's payload
    travels, the other's last one is worked on.
    """

    def step(turn: Array, carry: tuple[Payload, Payload]) -> tuple[Payload, Payload]:
        sent, received = carry
        arriving = forward.send(sent)
        returning = backward.send(backward.hop(received, turn))
        return forward.hop(arriving, turn), returning

    carry = forward.start(), backward.send(backward.start())
    sent, received = lax.fori_loop(1, forward.num_workers - 1, step, carry, unroll=forward.unroll)
    return forward.send(sent), received
