"""Bits to widths: the share of the super-groups that gets each width.

The paper moves thresholds on F, the squared norm of a super-group, until the budget is met (section
4). XLA requires static shapes, so here the fractions are fixed and the super-groups are ranked by
F. They are solved once, for a measured distribution of F or for `REFERENCE_LOG2_NORMS`.
"""

import functools
from collections.abc import Sequence

import numpy as np

from pallas_kernels.codec import SUPER_GROUP_SIZE, WIDTHS
from pallas_kernels.codec.levels import error_coefficient

# Quantiles that describe the distribution of log2 |super-group|, closer together at the ends.
POSITIONS = (
    *(0.0, 0.002, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9, 0.97, 0.99, 0.998, 1.0),
)

# Norms in the gradients of the example's model, relative to the median: mean of training steps 20,
# 100 and 200, 8 workers. Only the spread matters. `DynamiQ.fit` replaces it by that of other ones.
REFERENCE_LOG2_NORMS = (
    *(-10.66, -9.94, -9.33, -7.68, -2.75, -1.15, -0.81, -0.37, 0.0),
    *(0.24, 0.55, 1.27, 1.68, 2.37, 3.11, 3.94, 5.01),
)

_SMALL_SHARE = 0.02  # a width that fewer super-groups would take may be left out ...
_WORTH = 0.01  # ... if the expected error rises by no more than this in all

Fractions = tuple[tuple[int, float], ...]


def overhead_bits(group_size: int) -> float:
    """Return the bits per coordinate beside the codes: group scales, super-scale and norm."""
    return 8 / group_size + (16 + 16) / SUPER_GROUP_SIZE


def check_fractions(fractions: Fractions, bits: float, overhead: float) -> None:
    """Raise ValueError for fractions that are not possible, or that do not make `bits` bits."""
    if not (isinstance(fractions, tuple) and all(isinstance(pair, tuple) for pair in fractions)):
        raise ValueError(f"fractions={fractions!r} is not a tuple of (width, share) tuples.")
    widths = [width for width, _ in fractions]
    if (
        widths != sorted(set(widths), reverse=True)
        or any(width not in WIDTHS or share < 0 for width, share in fractions)
        or abs(sum(share for _, share in fractions) - 1) > 1e-6
    ):
        raise ValueError(
            f"fractions={fractions!r} is not possible. Give (width, share) pairs, widest "
            "first, with shares that add up to 1."
        )
    made = sum(width * share for width, share in fractions) + overhead
    if abs(made - bits) > 0.01:
        raise ValueError(
            f"fractions={fractions!r} make {made:.3f} bits, not bits={bits!r}. Give "
            f"bits={made:.3f}, or fractions that fit."
        )


@functools.lru_cache(maxsize=256)
def solve_fractions(
    code_bits: float, widths: tuple[int, ...], log2_norms: Sequence[float] | None = None
) -> Fractions:
    """Solve for the fractions of least expected squared error at a mean width.

    The error of a super-group at width w is F * c_w. The optimum gives every super-group the width
    that minimizes F * c_w + price * w, with the price that exhausts the budget. Widths that hardly
    lower the error are left out, since each one is compiled on its own.

    Args:
      code_bits: mean width, within [min(widths), max(widths)].
      widths: allowed widths.
      log2_norms: log2 of super-group norms at the quantiles `POSITIONS`; the reference's if None.

    Returns:
      (width, fraction) for the widths used, widest first; the mean width is `code_bits`.
    """
    quantiles = np.asarray(REFERENCE_LOG2_NORMS if log2_norms is None else log2_norms, np.float64)
    norms = np.interp((np.arange(4096) + 0.5) / 4096, POSITIONS, quantiles)[::-1]
    energies = np.exp2(2 * (norms - norms.max()))
    best, error = _optimum(code_bits, tuple(sorted(widths, reverse=True)), energies)
    allowed = error * (1 + _WORTH)
    for width, share in sorted(best, key=lambda item: item[1]):
        kept = tuple(w for w, _ in best if w != width)
        if share > _SMALL_SHARE or not kept or not kept[-1] <= code_bits <= kept[0]:
            continue
        fewer, error = _optimum(code_bits, kept, energies)
        best = fewer if error <= allowed else best
    return best


def _optimum(
    code_bits: float, widths: tuple[int, ...], energies: np.ndarray
) -> tuple[Fractions, float]:
    """Return the best fractions for sorted energies, and their expected error."""
    ordered = np.array(widths, np.float64)
    errors = energies[:, None] * np.array([error_coefficient(width) for width in widths])

    def choice(log_price: float) -> np.ndarray:
        return np.argmin(errors + np.exp(log_price) * ordered, axis=1)

    # The mean width falls as the price rises. The two sides of the last step bracket the budget.
    # A mix of them meets it exactly.
    low, high = -200.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ordered[choice(middle)].mean() > code_bits else (low, middle)
    over, under = (
        np.bincount(choice(price), minlength=len(ordered)) / len(energies) for price in (low, high)
    )
    gap = (over - under) @ ordered
    mix = float(np.clip((code_bits - under @ ordered) / gap, 0, 1)) if gap > 0 else 0.0
    shares = mix * over + (1 - mix) * under
    fractions = tuple(
        (width, float(share)) for width, share in zip(widths, shares, strict=True) if share > 0
    )
    error = sum(
        weight * np.take_along_axis(errors, choice(price)[:, None], axis=1).mean()
        for weight, price in ((mix, low), (1 - mix, high))
    )
    return fractions, float(error)


def log2_norm_quantiles(norms: np.ndarray) -> tuple[float, ...]:
    """Return quantiles at `POSITIONS` of log2 of positive, finite super-group norms [rows]."""
    norms = norms[np.isfinite(norms) & (norms > 0)]
    return tuple(np.quantile(np.log2(norms.astype(np.float64)), POSITIONS).tolist())
