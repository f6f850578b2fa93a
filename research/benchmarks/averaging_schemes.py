"""Simulations in NumPy of peers that average their values in rounds, some of them dead."""

from collections.abc import Callable, Iterator

import numpy as np

Rounds = Callable[[tuple[int, ...], float, np.random.Generator], Iterator[np.ndarray]]


def grid_rounds(grid: tuple[int, ...], dead: float, rng: np.random.Generator) -> Iterator:
    """Yield values of peers before the first and after each round of Moshpit."""
    values = rng.normal(size=grid)
    number = 0
    while True:
        yield values
        values = _averaged(values, number % len(grid), rng.random(values.shape) >= dead)
        number += 1


def group_rounds(grid: tuple[int, ...], dead: float, rng: np.random.Generator) -> Iterator:
    """Yield values with random groups, as large as a line of the grid."""
    values = rng.normal(size=np.prod(grid))
    while True:
        yield values
        order = rng.permutation(values.size)
        groups = values[order].reshape(-1, grid[0])
        values = np.empty_like(values)
        values[order] = _averaged(groups, 1, rng.random(groups.shape) >= dead).reshape(-1)


def gossip_rounds(grid: tuple[int, ...], dead: float, rng: np.random.Generator) -> Iterator:
    """Yield values with averages with both neighbors on a ring."""
    values = rng.normal(size=np.prod(grid))
    while True:
        yield values
        alive = rng.random(values.size) >= dead
        total = sum(np.roll(np.where(alive, values, 0), shift) for shift in (-1, 0, 1))
        count = sum(np.roll(alive.astype(int), shift) for shift in (-1, 0, 1))
        values = np.where(alive, total / np.maximum(count, 1), values)


def all_or_nothing_rounds(grid: tuple[int, ...], dead: float, rng: np.random.Generator) -> Iterator:
    """Yield values with an all-reduce that fails if any peer is dead."""
    values = rng.normal(size=np.prod(grid))
    while True:
        yield values
        if np.all(rng.random(values.size) >= dead):
            values = np.full_like(values, values.mean())


def masked_rounds(grid: tuple[int, ...], dead: float, rng: np.random.Generator) -> Iterator:
    """Yield values with a mean over all living peers."""
    values = rng.normal(size=np.prod(grid))
    while True:
        yield values
        values = _averaged(values, 0, rng.random(values.size) >= dead)


MOSHPIT = "Moshpit"
SCHEMES: dict[str, Rounds] = {
    MOSHPIT: grid_rounds,
    "random groups": group_rounds,
    "gossip on a ring": gossip_rounds,
    "all-reduce of all or nothing": all_or_nothing_rounds,
    "all-reduce with a mask": masked_rounds,
}


def variances(
    scheme: str, grid: tuple[int, ...], dead: float, *, rounds: int, trials: int
) -> np.ndarray:
    """Simulate a scheme many times.

    Returns:
      Mean variance between peers after 0, 1, ... rounds, around the mean before the first one and
      relative to the variance there: [rounds + 1].
    """
    rng = np.random.default_rng(0)
    spread = np.zeros(rounds + 1)
    for _ in range(trials):
        run = SCHEMES[scheme](grid, dead, rng)
        values = [next(run) for _ in range(rounds + 1)]
        spread += [np.mean((value - values[0].mean()) ** 2) for value in values]
    return spread / spread[0]


def rounds_until(spread: np.ndarray, variance: float) -> int | None:
    """Return the first number of rounds that leaves at most this variance; None if none does."""
    below = np.flatnonzero(spread <= variance)
    return int(below[0]) if below.size else None


def _averaged(values: np.ndarray, axis: int, alive: np.ndarray) -> np.ndarray:
    """Average along an axis among living peers."""
    total = np.where(alive, values, 0).sum(axis, keepdims=True)
    return np.where(alive, total / np.maximum(alive.sum(axis, keepdims=True), 1), values)
