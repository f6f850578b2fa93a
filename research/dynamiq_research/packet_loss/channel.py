"""Simulated channel that loses packets: JAX's own collectives are reliable."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.parts import check_integer, check_number, match_varying
from dynamiq_research.packet_loss.spans import ByteSpans

_GRANULE = 16  # bytes: a packet holds whole numbers of any dtype


class _Links(NamedTuple):
    """Probabilities that packets of each sender are lost, float32 [num_workers] each."""

    lost: Array  # any packet
    after_arrival: Array  # a packet that follows one that arrived
    after_loss: Array  # a packet that follows a lost one


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyChannel:
    """A simulated channel between any two workers, which loses packets and repeats none.

    It simulates: the collectives of JAX are reliable, and all bytes are sent. What counts as lost
    follows from a key, so runs with the same key lose the same packets. A packet is a range of
    bytes of a message that one worker sends to another. The packets of a message are sent in
    order. Different messages lose packets independently.

    Losses are bursts of a Gilbert channel, the Gilbert-Elliott model (Gilbert, Bell System
    Technical Journal 39, 1960) whose good state loses nothing and whose bad state loses all. With
    the default `burst`, packets are lost independently.

    >>> LossyChannel(rate=0.1).num_packets(10_000)
    8
    >>> LossyChannel(rate=[[0, 0.1], [0.2, 0]], packet_bytes=4096).rate
    ((0.0, 0.1), (0.2, 0.0))
    >>> LossyChannel(rate=0.5, burst=1.5)
    Traceback (most recent call last):
    ...
    ValueError: burst=1.5 is out of range. Give at least 1 / (1 - rate) = 2, or None.
    """

    # Share of the packets that are lost, 0 to 1: of all links, or [sender][receiver] of each. The
    # diagonal has no meaning, as a worker sends itself nothing.
    rate: float | Sequence[Sequence[float]] = 0.1
    burst: float | None = None  # mean length of a run of lost packets; None: independent losses
    packet_bytes: int = 1408  # of a message in a packet, a multiple of 16: fits an Ethernet frame

    def __post_init__(self):
        if isinstance(self.rate, numbers.Real):
            check_number("rate", self.rate, 0, 1)
        else:  # as tuples, so that channels can be compared and hashed
            object.__setattr__(self, "rate", _as_table(self.rate))
        check_integer("packet_bytes", self.packet_bytes, _GRANULE)
        if self.packet_bytes % _GRANULE:
            raise ValueError(
                f"packet_bytes={self.packet_bytes!r} is not a multiple of {_GRANULE}: a number "
                "could lie in two packets. Give one that is, such as 1408."
            )
        if self.burst is None:
            return
        if self.highest_rate == 1:
            raise ValueError(
                f"burst={self.burst!r} has no meaning with rate={self.rate!r}: everything is lost. "
                "Give burst=None."
            )
        shortest = 1 / (1 - self.highest_rate)
        if not (isinstance(self.burst, numbers.Real) and shortest <= self.burst < np.inf):
            raise ValueError(
                f"burst={self.burst!r} is out of range. Give at least 1 / (1 - rate) = "
                f"{shortest:g}, or None."
            )

    @property
    def highest_rate(self) -> float:
        """Share of the packets that the worst link loses."""
        rate = np.array(self.rate, np.float64)
        return float(rate[~np.eye(len(rate), dtype=bool)].max() if rate.ndim else rate)

    def num_packets(self, message_bytes: int) -> int:
        """Return the packets of a message."""
        return -(-message_bytes // self.packet_bytes)

    def arrived(self, key: Array, num_workers: int, receiver: Array, num_packets: int) -> Array:
        """Draw which packets arrive at a worker: bool [num_workers, num_packets], by sender.

        A worker's message to itself is never lost.

        Args:
          key: typed PRNG key, the same on all workers, another one for each exchange of messages.
          num_workers: number of senders.
          receiver: index of the worker that receives, an integer scalar.
          num_packets: packets of each message.

        Raises:
          ValueError: rates of links between another number of workers.
        """
        of_receiver = jax.random.fold_in(key, receiver)

        def of_sender(sender: Array, link: _Links) -> Array:
            return _lost(jax.random.fold_in(of_receiver, sender), link, num_packets)

        senders = jnp.arange(num_workers)
        lost = jax.vmap(of_sender)(senders, self._links(num_workers, receiver))
        return ~lost | (senders == receiver)[:, None]

    def intact(self, spans: ByteSpans, arrived: Array) -> Array:
        """Return which groups of terms have lost no byte, bool [groups].

        Args:
          spans: bytes of the message that each group depends on.
          arrived: which packets of the message arrived, bool [packets].
        """
        lost = jnp.cumsum(~arrived, dtype=jnp.int32)
        lost_before = jnp.pad(lost, (1, 0))
        first, after = self._packets(spans)
        return ~jnp.any(lost_before[after] > lost_before[first], axis=-1)

    def chance_intact(self, spans: ByteSpans, num_workers: int, receiver: Array) -> Array:
        """Compute the probability that groups are intact: float32 [num_workers, groups], by sender.

        Args:
          spans: bytes of the message that each group depends on.
          num_workers: number of senders.
          receiver: index of the worker that receives, an integer scalar.

        Raises:
          ValueError: rates of links between another number of workers.
        """
        # Sorted, the spans of a group are runs of packets, of which some were in a run before.
        first, after = lax.sort(self._packets(spans), dimension=-1, num_keys=1)
        reached = lax.cummax(after, axis=after.ndim - 1)
        reached = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
        new = after - jnp.maximum(first, reached)
        skipped = jnp.maximum(first - reached, 0)

        def of_sender(link: _Links) -> Array:
            # The state is forgotten by this factor with each packet.
            memory = link.after_loss - link.after_arrival
            leads_in = 1 - link.lost * (1 - memory ** (skipped + 1).astype(jnp.float32))
            # Nothing precedes the first packet of a group.
            leads_in = jnp.where(reached == 0, 1 - link.lost, leads_in)
            follow = (1 - link.after_arrival) ** jnp.maximum(new - 1, 0).astype(jnp.float32)
            return jnp.prod(jnp.where(new > 0, leads_in * follow, np.float32(1)), axis=-1)

        return jax.vmap(of_sender)(self._links(num_workers, receiver))

    def _packets(self, spans: ByteSpans) -> tuple[Array, Array]:
        """Return the first packet of each span and the one after its last, int32 [groups, spans].

        Both are 0 for a span that holds no byte.
        """
        first = spans.starts // np.int32(self.packet_bytes)
        after = -(-spans.stops // np.int32(self.packet_bytes))
        holds = spans.stops > spans.starts
        return jnp.where(holds, first, 0), jnp.where(holds, after, 0)

    def _links(self, num_workers: int, receiver: Array) -> _Links:
        rate = np.array(self.rate, np.float64)
        if rate.ndim and len(rate) != num_workers:
            raise ValueError(
                f"rate={self.rate!r:.200} is of links between {len(rate)} workers, and the axis "
                f"has {num_workers}. Give one rate, or [{num_workers}][{num_workers}]."
            )
        rate = np.broadcast_to(rate, (num_workers, num_workers))
        if self.burst is None:
            after_arrival = after_loss = rate
        else:  # lost packets are the share `rate` if as many runs of them start as end
            off_diagonal = np.where(np.eye(num_workers, dtype=bool), 0, rate)
            after_arrival = off_diagonal / (1 - off_diagonal) / self.burst
            after_loss = np.full_like(rate, 1 - 1 / self.burst)
        tables = (rate, after_arrival, after_loss)
        return _Links(*(jnp.asarray(table, jnp.float32)[:, receiver] for table in tables))


def _lost(key: Array, link: _Links, num_packets: int) -> Array:
    """Draw which packets of one sender's message are lost, bool [num_packets]."""
    if not num_packets:
        return jnp.zeros(0, bool)
    # A number below the first probability is a loss whatever precedes it, one of at least the
    # second an arrival. Between the two, which is nowhere without bursts, a packet is as the one
    # before.
    uniform = jax.random.uniform(key, (num_packets,), jnp.float32)
    is_lost = uniform < link.after_arrival
    is_decided = is_lost | (uniform >= link.after_loss)
    first = jax.random.uniform(jax.random.fold_in(key, 1), (), jnp.float32)
    is_lost = is_lost.at[0].set(first < link.lost)
    is_decided = is_decided.at[0].set(True)
    index = jnp.arange(num_packets, dtype=jnp.int32)
    last = lax.cummax(jnp.where(is_decided, index, match_varying(jnp.int32(0), uniform)))
    return is_lost[last]


def _as_table(rate: Any) -> tuple[tuple[float, ...], ...]:
    """Return the rates of links as tuples, or raise ValueError."""
    try:
        table = np.array(rate, np.float64)
    except (TypeError, ValueError):
        table = np.zeros(())
    if table.ndim != 2 or len(set(table.shape)) > 1 or len(table) < 2:
        raise ValueError(
            f"rate={rate!r:.200} is neither a number nor a square table of two or more workers. "
            "Give 0.1, or the rate of each link as [sender][receiver]."
        )
    for sender, rates in enumerate(table):
        for receiver, value in enumerate(rates):
            check_number(f"rate[{sender}][{receiver}]", float(value), 0, 1)
    return tuple(tuple(rates) for rates in table.tolist())
