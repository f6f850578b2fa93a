"""The quantizer's magnitude levels and the rounding between them.

    f(r) = ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^L - 1),   r = 0 .. L,   L = 2^(width - 1) - 1

(paper, section 4): geometric spacing, e = 0 is uniform. Rounding between neighbours is LINEAR in
the value: rounding in the log domain is biased (+1.3 % gain a hop at 2 bits).

One formula serves all widths and any e; what differs is numbers, so that rows of different widths
can go through one loop.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# f(r) / r is smooth and varies by a factor of 2 or 3 over the range, so this degree is exact to
# float32. A polynomial rather than `exp`: it vectorises everywhere and is the same on every backend
# up to the contraction of multiply-adds.
_DEGREE = 6
# (1 + 2 e^2)^L: up to the larger the polynomial is exact to float32, and from the smaller on the
# logarithm finds the right level (to 1/50 of a gap at 16 bits, less below).
MIN_GAP_RATIO, MAX_GAP_RATIO = 1.1, 7.0


class Levels(NamedTuple):
    """The numbers that describe one width's levels: float32 scalars, or columns [rows, 1] where
    every row has its own width.
    """

    top: Array | np.float32  # L, the largest magnitude code
    slope: Array | np.float32  # codes below t: floor(slope * t + log(1 + span * t) / log_base)
    span: Array | np.float32
    inverse_log_base: Array | np.float32
    growth: Array | np.float32  # f(r + 1) - f(r) = first_gap + growth * f(r)
    first_gap: Array | np.float32
    coefficients: tuple[Array | np.float32, ...]  # f(r) = r * sum_i c[i] r^i


def num_levels(width: int) -> int:
    """Largest magnitude code L of a `width`-bit sign-magnitude code."""
    return 2 ** (width - 1) - 1 if width else 0


def make_levels(width: int, nonuniformity: float) -> Levels:
    """Levels of a width with the given e; of width 0, a single level at zero."""
    top = num_levels(width)
    growth = 2 * nonuniformity**2
    span = math.expm1(math.log1p(growth) * top)
    uniform = top <= 1 or span == 0
    return Levels(
        top=np.float32(top),
        slope=np.float32(top if uniform else 0),
        span=np.float32(0 if uniform else span),
        inverse_log_base=np.float32(0 if uniform else 1 / math.log1p(growth)),
        growth=np.float32(0 if uniform else growth),
        first_gap=np.float32(1 / max(top, 1) if uniform else growth / span),
        coefficients=tuple(map(np.float32, _coefficients(top, span))),
    )


def levels_of_rows(classes: Sequence[Levels], class_of_row: Array) -> Levels:
    """Levels of every row as columns [rows, 1]: those of `classes[class_of_row]`, int32 [rows]."""
    table = np.array([jax.tree.leaves(levels) for levels in classes])
    numbers = jnp.asarray(table).at[class_of_row].get(mode="promise_in_bounds")
    columns = jnp.split(numbers, table.shape[1], axis=1)
    return jax.tree.unflatten(jax.tree.structure(classes[0]), columns)


def level(magnitude: Array, levels: Levels) -> Array:
    """f(magnitude): float32 codes in [0, L] to float32 positions in [0, 1], relative error under
    2^-21.
    """
    *lower, value = levels.coefficients
    for coefficient in reversed(lower):
        value = value * magnitude + coefficient
    return value * magnitude


def round_to_level(t: Array, offset: Array | np.float32, levels: Levels) -> Array:
    """Rounds float32 positions `t` in [0, 1] to float32 codes in [0, L].

    Rounds up with the probability that makes the result unbiased when `offset` is uniform in [0,
    1): code = r + (offset * (f(r+1) - f(r)) < t - f(r)).
    """
    # An estimate that lands one level off at a boundary is harmless: t - f(r) is then ~0 or ~1
    # gap and rounds to the same level.
    logarithm = jnp.log(np.float32(1) + t * levels.span)
    code = jnp.floor(t * levels.slope + logarithm * levels.inverse_log_base)
    code = jnp.minimum(code, levels.top - np.float32(1))
    below = level(code, levels)
    gap = below * levels.growth + levels.first_gap
    return code + (offset * gap < t - below).astype(jnp.float32)


def error_coefficient(width: int) -> float:
    """Expected squared error of a width relative to a row's squared norm, up to a common factor: ~
    1 / L^2.
    """
    return 1.0 / num_levels(width) ** 2 if width else 4.0


def _coefficients(top: int, span: float) -> list[float]:
    """Coefficients c of f(r) = r * sum_i c[i] r^i, fitted at Chebyshev points."""
    if top <= 1 or span == 0:
        return [1 / max(top, 1)] + [0.0] * _DEGREE
    points = 0.5 + 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    fitted = np.polynomial.Polynomial.fit(
        points,
        np.expm1(math.log1p(span) * points) / (span * points),
        _DEGREE,
        domain=[0, 1],
        window=[0, 1],
    )
    return [c / top ** (i + 1) for i, c in enumerate(fitted.coef)]
