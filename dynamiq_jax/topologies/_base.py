"""Interface of topologies, which move opaque payloads between workers."""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._core import Axis, ChunkCodec, Payload, SumCodec, WireCost


class Arrival(NamedTuple):
    """Last messages of a chunk that this worker owns: with its own values, they make the sum."""

    messages: Payload  # stacked on a leading axis
    chunk: Array
    turn: Array | int  # of the compression of the sum


class Scattered(NamedTuple):
    """Result of a reduce-scatter."""

    values: Array  # sum of the chunks that this worker owns, float32 [coordinates]
    token: Array  # float32 [1], available once all messages are here, before they are decoded


class Gathered(NamedTuple):
    """Payloads of all chunks, on every worker."""

    payloads: Payload  # stacked on a leading axis
    codec: SumCodec  # that decodes them

    def decode(self) -> Array:
        """Decode the values: float32 [size], the same bits on all workers."""
        return self.codec.decompress(self.payloads)

    @property
    def token(self) -> Array:
        """float32 [1], available once the payloads are here, before they are decoded."""
        return _token_of(self.payloads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology(abc.ABC):
    """A route of chunks between the workers of one axis.

    Worker w owns chunk w: its sum ends there. An all-reduce compresses the sum and gathers the
    bytes. Every worker, the owner too, decodes the same bytes, so that replicas are bit-identical.
    The laws of its methods, of four workers:

    >>> from dynamiq_jax.topologies import Butterfly, Ring
    >>> Ring().steps(4), Butterfly().steps(4)  # one after the other
    (3, 2)
    >>> Ring().compressions(4)  # of each partial sum, the last one of all workers
    [(1, 1), (1, 2), (1, 3), (1, 4)]
    >>> Butterfly().compressions(4)
    [(2, 1), (1, 2), (1, 4)]
    """

    @abc.abstractmethod
    def arrival(self, codec: ChunkCodec, axis: Axis) -> Arrival:
        """Run everything up to the last transfer, of the chunk that the worker owns.

        Law: the messages of a chunk and the worker's own values hold the values of every worker
        once, and no two compressions of a chunk have one turn.
        """

    @abc.abstractmethod
    def steps(self, num_workers: int) -> int:
        """Return the number of transfers in sequence before the gather; each pays the latency.

        Law: no two of them can run at the same time.
        """

    @abc.abstractmethod
    def compressions(self, num_workers: int) -> list[tuple[int, int]]:
        """List the compressions of one chunk: (how many partial sums, of how many workers each).

        Law: the last one is of the sum of all workers, and they are as many as turns.
        """

    def error_growth(self, num_workers: int, *, agreement: float = 0.0) -> float:
        """Return the vNMSE of the sum over that of one compression.

        A compression adds an error of a fixed share of the squared norm of what it compresses. A
        partial sum of k workers has a squared norm of a k^2 + (1 - a) k times that of one worker,
        where a, the agreement, is the share of the energy that all workers have in common.
        Roundings count as independent.

        >>> from dynamiq_jax.topologies import AllToAll, Ring
        >>> round(Ring().error_growth(64)), round(AllToAll().error_growth(64))
        (32, 2)
        """
        if not 0 <= agreement <= 1:
            raise ValueError(f"agreement={agreement!r} is not a share. Give 0 to 1.")

        def energy(workers: int) -> float:
            return agreement * workers**2 + (1 - agreement) * workers

        compressed = self.compressions(num_workers)
        return sum(count * energy(k) for count, k in compressed) / energy(num_workers)

    @property
    def is_loop(self) -> bool:
        """True if hops are a loop. A compiler runs no other computation during a loop."""
        return False

    @property
    def is_far(self) -> bool:
        """True if workers send across the whole network, and not to their neighbors alone."""
        return True

    def supports(self, num_workers: int) -> bool:
        """Return whether the topology works for an axis size; `check` follows it."""
        return True

    def check(self, num_workers: int) -> None:
        """Raise ValueError for an axis size that `supports` does not accept."""
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

    def bytes_sent(self, cost: WireCost, num_workers: int) -> int:
        """Return the bytes that each worker sends in an all-reduce.

        A worker sends the statistics, the payloads up to the arrival, and as many payloads to
        gather the sums.
        """
        gathered = (num_workers - 1) * cost.payload_bytes
        return cost.statistics_bytes + self.bytes_scattered(cost, num_workers) + gathered

    def bytes_scattered(self, cost: WireCost, num_workers: int) -> int:
        """Return the bytes of the payloads that each worker sends up to the arrival.

        It sends one payload for each chunk that another worker owns, the fewest possible.
        """
        return cost.bytes_scattered(num_workers - 1)

    def all_reduce(self, codec: ChunkCodec, axis: Axis) -> Gathered:
        """Run everything up to the payloads of all sums, on all workers."""
        return gather(codec, self.summed(codec, axis), axis)

    def reduce_scatter(self, codec: ChunkCodec, axis: Axis) -> Scattered:
        """Sum the chunk that the worker owns. The sum is never compressed."""
        arrival = self.arrival(codec, axis)
        values = codec.accumulate(arrival.messages, arrival.chunk)
        return Scattered(values, _token_of(arrival.messages))

    def summed(self, codec: ChunkCodec, axis: Axis) -> Payload:
        """Return the payload of the sum of the chunk that the worker owns."""
        return codec.hop(*self.arrival(codec, axis))


def gather(codec: SumCodec, mine: Payload, axis: Axis) -> Gathered:
    """Gather the payload of each worker.

    Args:
      codec: codec that decodes the payloads.
      mine: payload of the chunk that this worker owns.
      axis: workers.
    """
    return Gathered(jax.tree.map(axis.gather, mine), codec)


def _token_of(payloads: Payload) -> Array:
    ends = [leaf.reshape(-1)[:1].astype(jnp.float32) for leaf in jax.tree.leaves(payloads)]
    return jnp.concatenate(ends).sum(keepdims=True)
