"""Rounds of islands on a link: what they need of it, and how much of the time computes."""

from typing import NamedTuple

SHARE = 0.1  # of the time of the local steps that an exchange may take
# Times of exchanges over real links, relative to the formula: 1.25 to 1.66 in reports of others.
MARGINS = (1.25, 1.66)
SPARSE = 0.25  # bits of a coordinate in a message of `islands.Sparse`
# Rounds to one loss with those messages, relative to exact ones; messages of 3 and 4 bits take as
# many as exact ones: benchmarks/results/islands_rounds.json.
SPARSE_ROUNDS = 1.21
# Nanoseconds a coordinate of encoding a message, and of decoding one, on two cores of a CPU:
# benchmarks/results/islands_codec.json.
SPARSE_NS, DENSE_NS = (9.6, 0.8), (2.4, 1.4)
_DAY = 86400.0


class IslandRounds(NamedTuple):
    """Prediction for messages of some bits."""

    bits: float
    rate: float  # bits a second at which an exchange takes `SHARE` of a round
    computing: tuple[float, float]  # least and largest share of the time in local steps
    message_bytes: float
    bytes_a_day: float  # of all islands in the store
    to_loss: float  # seconds to a loss that takes one round of exact messages


def island_rounds(
    size: int, islands: int, bits: float, seconds: float, link: float, on_cpu: bool = False
) -> IslandRounds:
    """Predict rounds of `islands.Islands`.

    An island sends its message once, and receives those of all others.

    Args:
      size: parameters.
      islands: number of islands.
      bits: of a coordinate in a message.
      seconds: of the local steps of a round.
      link: bits a second of each island.
      on_cpu: whether CPUs encode and decode. Elsewhere, that time is left out.
    """
    encode, decode = SPARSE_NS if bits == SPARSE else DENSE_NS
    coding = 1e-9 * size * (encode + islands * decode) if on_cpu else 0.0
    received = size * bits * (islands - 1)
    rounds = [seconds + coding + margin * received / link for margin in reversed(MARGINS)]
    message = size * bits / 8
    mean = sum(rounds) / 2
    return IslandRounds(
        bits=bits,
        rate=received / (SHARE * seconds),
        computing=(seconds / rounds[0], seconds / rounds[1]),
        message_bytes=message,
        bytes_a_day=islands * message * _DAY / rounds[1],
        to_loss=mean * (SPARSE_ROUNDS if bits == SPARSE else 1.0),
    )


def island_memory(size: int) -> int:
    """Return bytes on the host: parameters, reference, momentum and residual, float32."""
    return 4 * 4 * size
