"""Rounds of islands on a link: what they need of it, and how much of the time computes."""

from typing import NamedTuple

from dynamiq_jax.islands import Sparse

SHARE = 0.1  # of the time of the local steps that an exchange may take
# Times of exchanges over real links, relative to the formula: 1.25 to 1.66 in reports of others.
MARGINS = (1.25, 1.66)
_DAY = 86400.0


class MessageKind(NamedTuple):
    """A kind of message. By default, it is of some bits for every coordinate."""

    bits: float  # of a coordinate
    # Nanoseconds a coordinate on two cores of a CPU: benchmarks/results/islands_codec.json.
    encode_ns: float = 2.3
    decode_ns: float = 1.4
    # To one loss, relative to exact messages: benchmarks/results/islands_rounds.json. Messages of 3
    # and 4 bits take as many.
    rounds: float = 1.0


SPARSE = MessageKind(Sparse().bits_a_coordinate, encode_ns=9.7, decode_ns=0.9, rounds=1.21)


class IslandRounds(NamedTuple):
    """Prediction for a kind of message."""

    message: MessageKind
    rate: float  # bits a second at which an exchange takes `SHARE` of a round
    computing: tuple[float, float]  # least and largest share of the time in local steps
    message_bytes: float
    bytes_a_day: float  # of all islands in the store
    to_loss: float  # seconds to a loss that takes one round of exact messages


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
        to_loss=message.rounds * (shortest + longest) / 2,
    )


def island_memory(size: int) -> int:
    """Return bytes on the host: parameters, reference, momentum and residual, float32."""
    return 4 * 4 * size
