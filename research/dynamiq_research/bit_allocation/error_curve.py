"""Expected error of DynamiQ at every budget, from the norms of the rows of a bucket.

The codec gives its bits by one price (`pallas_kernels.codec.allocation`). So the bits that a bucket
takes at each price, and the error that is left, are sums over rows above thresholds: all budgets
follow from one histogram of the norms.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, Quantizer
from pallas_kernels.codec.allocation import ENERGY_LIMIT
from pallas_kernels.codec.levels import num_levels
from pallas_kernels.codec.packing import MAX_WIDTH

_SAMPLE_ROWS = 64  # of normal values, from which errors of widths are computed


@dataclasses.dataclass(frozen=True)
class RowNorms:
    """Norms of the rows of a bucket, as the codec has them."""

    energies: NDArray[np.int64]  # logarithms, [rows]; 0 of a row of zeros
    squares: NDArray[np.float64]  # squared norms, [rows]

    @staticmethod
    def of(flat: NDArray[np.float32]) -> "RowNorms":
        """Compute norms, of a vector [size] without NaN and Inf."""
        rows = np.pad(flat, (0, -flat.size % SUPER_GROUP_SIZE)).reshape(-1, SUPER_GROUP_SIZE)
        squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
        bits = np.sqrt(squares).astype(jnp.bfloat16).view(np.uint16)
        return RowNorms((bits >> 1).astype(np.int64), squares)


class ErrorCurve:
    """Expected squared error of one compression of a bucket, as a function of its units.

    Args:
      norms: of the rows.
      layout: of a part of the bucket beside fast axes; its units do not count.
    """

    def __init__(self, norms: RowNorms, layout: Layout):
        allocation = layout.allocation
        steps, power = allocation.steps, allocation.exponent
        needed = np.array([step.energy for step in steps])
        before, after = ([getattr(step, end) for step in steps] for end in ("before", "after"))
        errors = distortions(layout.quantizer)
        saved = errors[before] - errors[after]
        # At the lowest prices, every row with energy has the widest width.
        prices = np.arange(int(norms.energies.max(initial=0)), -needed[-1] - 1, -1)
        thresholds = prices[:, None] + needed
        if 0 not in allocation.widths:  # all rows but zeros have the narrowest width
            thresholds[:, 0] = np.minimum(thresholds[:, 0], 1)
        # Rows of zeros, those of padding included, get bits after all others, and have no error.
        has_energy = norms.energies > 0
        codes, squares = norms.energies[has_energy], norms.squares[has_energy]
        rows = _at_least(codes, np.ones_like(squares), thresholds)
        self._units = rows @ np.subtract(after, before)
        # Errors, and errors as the method counts them: by powers of squared norms.
        self._errors = [
            values.sum() - _at_least(codes, values, thresholds) @ saved
            for values in (squares, squares**power)
        ]

    def at(self, units: float) -> NDArray[np.float64]:
        """Return the squared error, and the sum that the method minimizes: [2]."""
        return np.array([np.interp(units, self._units, errors) for errors in self._errors])


@functools.cache
def distortions(quantizer: Quantizer) -> NDArray[np.float64]:
    """Return the expected error of every width over the energy of a row of normal values, [17]."""
    rows = np.random.default_rng(0).standard_normal((_SAMPLE_ROWS, SUPER_GROUP_SIZE))
    values = np.abs(rows).reshape(-1, quantizer.group_size)
    scales = values.max(axis=1, keepdims=True)
    positions = values / scales
    errors = [1.0]
    for width in range(1, MAX_WIDTH + 1):
        top = num_levels(width)
        if top == 0:  # one bit is a sign alone
            errors.append(1.0)
            continue
        codes: Any = np.arange(top + 1, dtype=np.float32)
        levels = np.asarray(quantizer.levels(width).position(codes), np.float64)
        above = np.clip(np.searchsorted(levels, positions, side="right"), 1, top)
        # Random rounding between two levels.
        squared = np.maximum((positions - levels[above - 1]) * (levels[above] - positions), 0)
        errors.append(float(np.sum(squared * scales**2) / np.sum(values**2)))
    return np.array(errors)


def _at_least(
    codes: NDArray[np.int64], values: NDArray[np.float64], thresholds: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the sums of values of rows whose energies are at least thresholds."""
    sums = np.bincount(codes, values, ENERGY_LIMIT + 1)[::-1].cumsum()[::-1]
    return sums[np.clip(thresholds, 1, ENERGY_LIMIT)]
