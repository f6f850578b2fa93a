"""Rounds of islands on a link: what they need of it, and how much of the time computes."""

from typing import NamedTuple

SHARE = 0.1  # of the time of the local steps that an exchange may take
# Times of exchanges over real links, relative to the formula: 1.25 to 1.66 in reports of others.
MARGINS = (1.25, 1.66)
SPARSE = 0.25  # bits of a coordinate in a message of `islands.Sparse`
_DAY = 86400.0


class IslandRounds(NamedTuple):
    """Prediction for messages of some bits."""

    bits: float
    rate: float  # bits a second at which an exchange takes `SHARE` of a round
    computing: tuple[float, float]  # least and largest share of the time in local steps
    message_bytes: float
    bytes_a_day: float  # of all islands in the store


def island_rounds(
    size: int, islands: int, bits: float, seconds: float, link: float
) -> IslandRounds:
    """Predict rounds of `islands.Islands`.

    An island sends its message once, and receives those of all others.

    Args:
      size: parameters.
      islands: number of islands.
      bits: of a coordinate in a message.
      seconds: of the local steps of a round.
      link: bits a second of each island.
    """
    received = size * bits * (islands - 1)
    rounds = [seconds + margin * received / link for margin in reversed(MARGINS)]
    message = size * bits / 8
    return IslandRounds(
        bits=bits,
        rate=received / (SHARE * seconds),
        computing=(seconds / rounds[0], seconds / rounds[1]),
        message_bytes=message,
        bytes_a_day=islands * message * _DAY / rounds[1],
    )


def island_memory(size: int) -> int:
    """Return bytes on the host: parameters, reference, momentum and residual, float32."""
    return 4 * 4 * size
