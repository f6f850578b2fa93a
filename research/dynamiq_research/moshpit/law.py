"""Law of the variance that is left between the peers of a grid after rounds with dead peers."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.parts import check_integer, check_number


def moshpit_variance(rounds: int, *, grid: tuple[int, ...], dead: float = 0.0) -> float:
    """Return the expected variance between peers after rounds of `moshpit_mean`.

    It is relative to the variance before the first round. Values of peers are independent there,
    sums are exact, and each peer is dead in each round with the same probability, independently of
    others and of other rounds.

    A round over an axis of M peers keeps the share rho = dead + (1 - dead^M) / M of the weight that
    a peer has in its own value. In the first round of each axis, the variance of N peers is
    therefore (product of all rho - 1/N) / (1 - 1/N). In later rounds, peers meet again whose values
    are not independent any more, and the variance falls more slowly.

    Args:
      rounds: number of rounds, any. Round t is over axis `t % len(grid)`.
      grid: peers along each axis, each at least 2.
      dead: probability that a peer is dead in a round.

    Returns:
      A share from 0 to 1.

    Raises:
      ValueError: a number outside its range.

    >>> [round(moshpit_variance(rounds, grid=(8, 8, 8), dead=0.05), 4) for rounds in range(5)]
    [1.0, 0.1734, 0.0287, 0.0034, 0.0006]
    >>> moshpit_variance(3, grid=(8, 8, 8))
    0.0
    """
    grid = _check_grid(grid)
    check_integer("rounds", rounds, 0)
    check_number("dead", dead, 0, 1)
    # Covariances of two peers depend only on the set of axes along which their places differ:
    # [differ along axis 0, differ along axis 1, ...]. At index 0 is the variance of one peer.
    own = (0,) * len(grid)
    covariance = np.zeros((2,) * len(grid))
    covariance[own] = 1
    for number in range(rounds):
        covariance = _after_round(covariance, number % len(grid), grid, dead)
    peers = math.prod(grid)
    left = (covariance[own] - 1 / peers) / (1 - 1 / peers)
    return max(0.0, float(left))  # rounding can leave less than none


def _after_round(
    covariance: NDArray[np.float64], axis: int, grid: tuple[int, ...], dead: float
) -> NDArray[np.float64]:
    """Return the covariances after a round over one axis."""
    others = grid[axis] - 1
    # Expected weight of a peer's own value in its new one. The others on its line share the rest.
    own = dead + (1 - dead ** grid[axis]) / grid[axis]
    # Expected weight of pairs at the same place of their lines, in the covariance of two peers at
    # the same place. Two lines have dead peers of their own; a line alone has the same ones twice.
    same_place = np.full((2,) * (len(grid) - 1), own**2 + (1 - own) ** 2 / others)
    same_place[(0,) * (len(grid) - 1)] = own
    # The same for two peers at different places.
    different = (1 - same_place) / others
    same, other = np.moveaxis(covariance, axis, 0)
    after = np.stack([other + weight * (same - other) for weight in (same_place, different)])
    return np.moveaxis(after, 0, axis)


def _check_grid(grid: Any) -> tuple[int, ...]:
    sizes = tuple(grid) if isinstance(grid, tuple | list) else ()
    if not sizes:
        raise ValueError(f"grid={grid!r} is no grid. Give the peers along each axis: (8, 8).")
    for size in sizes:
        check_integer(f"grid={grid!r}: size", size, 2)
    return sizes
