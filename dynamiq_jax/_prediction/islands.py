"""The link that an island of local SGD needs."""

SHARE = 0.1  # of the time of the local steps that an exchange may take


def island_rate(size: int, islands: int, bits: float, seconds: float) -> float:
    """Return the bits a second at which an exchange of `islands.Islands` takes `SHARE` of a round.

    An island sends its message once, and receives those of all others.

    Args:
      size: parameters.
      islands: number of islands.
      bits: of a coordinate in a message.
      seconds: of the local steps of a round.
    """
    return size * bits * (islands - 1) / (SHARE * seconds)
