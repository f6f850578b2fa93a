"""The loss that runs have to reach, and the time at which one does.

The exact run lowers the evaluation loss from that of the pre-trained weights to the lowest that it
ever has. The 99 % target is the loss at which it has made 99 % of that way. A run reaches it
where the lowest loss it has had so far crosses it, between two evaluations on a straight line.
"""

from collections.abc import Sequence

import numpy as np

FRACTIONS = (0.99, 0.995)


def target_loss(exact: Sequence[float], fraction: float) -> float:
    """Return the loss after a fraction of the exact run's way, from its losses at the evaluations.

    >>> target_loss([5.0, 4.5, 4.0], 0.99)
    4.01
    """
    return exact[0] - fraction * (exact[0] - min(exact))


def reached(at: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Return the place where a run reaches a target; None if it never does.

    Args:
      at: seconds or steps of the evaluations, ascending.
      losses: as many, on the held-out text.
      target: loss to reach.

    >>> reached([0, 10, 20], [5.0, 4.0, 3.0], 3.5)
    15.0
    """
    lowest = np.minimum.accumulate(losses)
    if not lowest[-1] <= target:  # nan is never there
        return None
    after = int(np.argmax(lowest <= target))
    if after == 0:
        return float(at[0])
    share = (lowest[after - 1] - target) / (lowest[after - 1] - lowest[after])
    return float(at[after - 1] + share * (at[after] - at[after - 1]))
