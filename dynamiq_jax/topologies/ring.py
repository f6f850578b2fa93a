"""Ring: reduce-scatter by n - 1 neighbour exchanges, then an all-gather of the compressed sums."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.chunks import ChunkCodec, Payload
from dynamiq_jax.topologies.base import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Topology):
    """Bandwidth-optimal, n compressions on a coordinate's path.

    Chunk c starts at worker c + 1 and ends at worker c, which compresses the final sum. The gather
    forwards these bytes verbatim and every worker, the owner too, decodes the payload, so that all
    replicas hold the same bits.

    In a bidirectional ring each worker owns two chunks of half the size, 2 c and 2 c + 1, and the
    second goes the other way round.
    """

    bidirectional: bool = False  # one direction's transfer runs under the other's kernel, on a GPU

    def all_reduce(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> Array:
        """See `Topology`."""
        ways = [_Direction(codec, axis_name, num_workers, step=1)]
        if self.bidirectional:
            ways = [dataclasses.replace(ways[0], step=step, of=2) for step in (1, -1)]
        final = [_reduce(*ways)] if len(ways) == 1 else _reduce_both(*ways)
        mine = jax.tree.map(lambda *leaves: jnp.stack(leaves), *final)
        gathered = jax.tree.map(lambda leaf: compat.all_gather(leaf, axis_name), mine)
        return codec.decompress(
            jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), gathered)
        )

    def payloads_sent(self, num_workers: int) -> int:
        """See `Topology`."""
        return 2 * (num_workers - 1) * (2 if self.bidirectional else 1)

    def num_chunks(self, num_workers: int) -> int:
        """See `Topology`."""
        return 2 * num_workers if self.bidirectional else num_workers


@dataclasses.dataclass(frozen=True)
class _Direction:
    """Chunks that go round one way."""

    codec: ChunkCodec
    axis_name: str
    num_workers: int
    step: int  # 1: to the next worker, -1: to the one before
    of: int = 1  # directions

    def start(self) -> Payload:
        return self.codec.compress(self._chunk(0), 0)

    def send(self, payload: Payload) -> Payload:
        n = self.num_workers
        to = [(source, (source + self.step) % n) for source in range(n)]
        return lax.ppermute(payload, self.axis_name, to)

    def hop(self, received: Payload, hop: Array | int) -> Payload:
        return self.codec.hop((received,), self._chunk(hop), hop)

    def _chunk(self, hop: Array | int) -> Array:
        owner = (lax.axis_index(self.axis_name) - self.step * (hop + 1)) % self.num_workers
        return owner * self.of + (0 if self.step == 1 else 1)


def _reduce(way: _Direction) -> Payload:
    """Payload of the sum of the worker's own chunk."""
    return lax.fori_loop(
        1, way.num_workers, lambda hop, sent: way.hop(way.send(sent), hop), way.start()
    )


def _reduce_both(forward: _Direction, backward: _Direction) -> tuple[Payload, Payload]:
    """Payloads of the sums of the worker's own two chunks.

    Half a step apart: while one direction's payload travels, the other's last one is worked on.
    """

    def step(hop: Array, carry: tuple[Payload, Payload]) -> tuple[Payload, Payload]:
        sent, received = carry
        arriving = forward.send(sent)
        returning = backward.send(backward.hop(received, hop))
        return forward.hop(arriving, hop), returning

    last = forward.num_workers - 1
    if last == 0:
        return forward.start(), backward.start()
    carry = forward.start(), backward.send(backward.start())
    sent, received = lax.fori_loop(1, last, step, carry)
    arriving = forward.send(sent)
    return forward.hop(arriving, last), backward.hop(received, last)
