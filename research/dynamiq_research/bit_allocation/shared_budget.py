"""Best bits of groups of leaves under one budget of bytes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamiq_research.bit_allocation.groups import Expected, Group

_FINEST = 100  # parts of a bit in which one group gets what is left of the bytes


class _Piece(NamedTuple):
    """Bits that a group takes together, since a part of them has no better return."""

    group: int
    start: float  # bits
    stop: float
    bytes: int
    saved: float  # error


@dataclasses.dataclass(frozen=True)
class SharedBudget:
    """Groups of leaves with their expected errors, which are averaged over steps."""

    groups: tuple[Group, ...]
    energies: NDArray[np.float64]  # share of the squared norm of all groups, [groups]
    errors: tuple[NDArray[np.float64], ...]  # of each group: vNMSE of its part, [its grid]
    costs: tuple[NDArray[np.float64], ...]  # what is minimized, likewise

    @staticmethod
    def of(groups: Sequence[Group], steps: Sequence[Sequence[Expected]]) -> "SharedBudget":
        """Average over steps, each relative to its own norm.

        Args:
          groups: groups of leaves.
          steps: for each step, what is expected of each group.
        """

        def mean(field: str, total: str) -> tuple[NDArray[np.float64], ...]:
            sums = [sum(getattr(each, total) for each in step) for step in steps]
            return tuple(
                np.mean(
                    [getattr(step[n], field) / s for step, s in zip(steps, sums, strict=True)], 0
                )
                for n in range(len(groups))
            )

        energies = np.array(mean("energy", "energy"))
        return SharedBudget(
            tuple(groups), energies, mean("errors", "energy"), mean("costs", "cost")
        )

    @property
    def given(self) -> list[float]:
        """Bits that the user gave to each group."""
        return [group.method.bits for group in self.groups]

    def errors_of(self, bits: Sequence[float]) -> list[float]:
        """Return the expected error of each group, as a part of the vNMSE of all."""
        return self._at(self.errors, bits)

    def costs_of(self, bits: Sequence[float]) -> list[float]:
        """Return what is minimized of each group."""
        return self._at(self.costs, bits)

    def _at(self, values: Sequence[NDArray[np.float64]], bits: Sequence[float]) -> list[float]:
        return [
            float(np.interp(one, group.grid, each))
            for one, group, each in zip(bits, self.groups, values, strict=True)
        ]

    def solve(self, budget: int) -> list[float]:
        """Return the bits of each group with the least sum of costs.

        This is the linear relaxation of a knapsack: pieces by their return for a byte. All groups
        have bits of their grid, except for the first one whose next piece does not fit.

        Args:
          budget: bytes of all groups together.
        """
        bits = [group.grid[0] for group in self.groups]
        left = budget - sum(g.bytes_sent(one) for g, one in zip(self.groups, bits, strict=True))
        pieces = [piece for number in range(len(bits)) for piece in self._pieces(number)]
        for piece in sorted(pieces, key=lambda piece: -piece.saved / piece.bytes):  # stable
            if piece.bytes > left:
                bits[piece.group] = self._part(piece, left)
                break
            bits[piece.group] = piece.stop
            left -= piece.bytes
        return bits

    def _pieces(self, number: int) -> Iterator[_Piece]:
        """Yield the edges of the lower convex hull of costs over bytes."""
        group, costs = self.groups[number], self.costs[number]
        hull: list[tuple[int, float, float]] = []
        for bits, cost in zip(group.grid, map(float, costs), strict=True):
            point = group.bytes_sent(bits), cost, bits
            if hull and (point[0] <= hull[-1][0] or cost >= hull[-1][1]):
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        for before, after in itertools.pairwise(hull):
            sent, saved = after[0] - before[0], before[1] - after[1]
            yield _Piece(number, before[2], after[2], sent, saved)

    def _part(self, piece: _Piece, left: int) -> float:
        """Return the most bits of a piece that fit into what is left."""
        group = self.groups[piece.group]
        before = group.bytes_sent(piece.start)
        low, high = 0, math.ceil((piece.stop - piece.start) * _FINEST)
        while high - low > 1:
            middle = (low + high) // 2
            fits = group.bytes_sent(_after(piece, middle)) - before <= left
            low, high = (middle, high) if fits else (low, middle)
        bits = _after(piece, low)
        return bits if group.bytes_sent(bits) > before else piece.start


def _after(piece: _Piece, parts: int) -> float:
    """Return the start of a piece and some of its parts, in bits."""
    return round(piece.start + parts / _FINEST, 6)


def _slope(start: tuple[int, float, float], end: tuple[int, float, float]) -> float:
    """Return how much each byte between two points saves."""
    return (start[1] - end[1]) / (end[0] - start[0])
