"""Rounds of islands on a link: what they need of it, and how much of the time computes."""

from collections.abc import Iterable
from typing import NamedTuple

from dynamiq_jax.islands import Sparse

SHARE = 0.1  # of the time of the local steps that an exchange may take
# Times of exchanges over real links, relative to the formula: 1.25 to 1.66 in reports of others.
MARGINS = (1.25, 1.66)
_MARGIN = sum(MARGINS) / 2
_DAY = 86400.0


class MessageKind(NamedTuple):
    """A kind of message. By default, it is of some bits for every coordinate."""

    bits: float  # of a coordinate
    # Nanoseconds a coordinate on two cores of a CPU: benchmarks/results/islands_codec.json.
    encode_ns: float = 1.3
    decode_ns: float = 1.4
    # To one loss, relative to exact messages: benchmarks/results/islands_rounds.json. Messages of 3
    # and 4 bits take as many.
    rounds: float = 1.0

    keep: int | None = None  # of `Sparse`; None for dense messages


SPARSE_KINDS = tuple(
    MessageKind(Sparse(keep=keep).bits_a_coordinate, encode_ns, decode_ns, rounds, keep)
    for keep, encode_ns, decode_ns, rounds in (
        (272, 1.5, 0.4, 1.07),
        (124, 1.3, 0.3, 1.23),
        (46, 1.3, 0.2, 1.74),
    )
)
SPARSE = SPARSE_KINDS[1]  # of the default settings
LEAST_DENSE_BITS = 3  # of dense messages whose rounds to a loss were measured
# Steps to one loss with an all-reduce in each, relative to the local steps of islands with messages
# of 4 bits: benchmarks/results/islands_links.json.
PLAIN_STEPS = 0.62


class LinkTime(NamedTuple):
    """Time that depends on the bandwidth of a link."""

    computing: float  # seconds, on any link
    bits: float  # that the link carries

    def on(self, link: float) -> float:
        """Return the seconds on a link of some bits a second."""
        return self.computing + self.bits / link


class IslandRounds(NamedTuple):
    """Prediction for a kind of message."""

    message: MessageKind
    rate: float  # bits a second at which an exchange takes `SHARE` of a round
    computing: tuple[float, float]  # least and largest share of the time in local steps
    message_bytes: float
    bytes_a_day: float  # of all islands in the store
    to_loss: LinkTime  # to a loss that takes one round of exact messages


def island_rounds(
    size: int, islands: int, message: MessageKind, seconds: float, link: float, on_cpu: bool = False
) -> IslandRounds:
    """Predict rounds of `islands.Islands`.

    An island sends its message of `size` parameters once, and receives those of all others, over a
    link of some bits a second. The local steps of a round take `seconds`. Where no CPU encodes and
    decodes, that time is left out.
    """
    coding = 1e-9 * size * (message.encode_ns + islands * message.decode_ns) if on_cpu else 0.0
    received = size * message.bits * (islands - 1)
    shortest, longest = (seconds + coding + margin * received / link for margin in MARGINS)
    message_bytes = size * message.bits / 8
    return IslandRounds(
        message=message,
        rate=received / (SHARE * seconds),
        computing=(seconds / longest, seconds / shortest),
        message_bytes=message_bytes,
        bytes_a_day=islands * message_bytes * _DAY / shortest,
        to_loss=LinkTime(message.rounds * (seconds + coding), message.rounds * _MARGIN * received),
    )


def plain_time(size: int, workers: int, bits: float, steps: int, seconds: float) -> LinkTime:
    """Predict the time of an all-reduce in every step to a loss, as `IslandRounds.to_loss`.

    Margins of real links are those of islands.

    Args:
      size: parameters.
      workers: number of workers, of which each sends and receives its share of a ring.
      bits: of a coordinate.
      steps: local steps of a round of islands.
      seconds: of all these steps, computation alone.
    """
    sent = steps * 2 * (workers - 1) / workers * size * bits
    return LinkTime(PLAIN_STEPS * seconds, PLAIN_STEPS * _MARGIN * sent)


def faster_from(plain: LinkTime, islands: Iterable[LinkTime]) -> float:
    """Return the bandwidth from which on plain steps, which compute less, take the least time."""
    return max(
        max(plain.bits - each.bits, 0.0) / (each.computing - plain.computing) for each in islands
    )
