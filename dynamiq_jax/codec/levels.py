"""The quantizer's magnitude levels, and the rounding between them.

A code r = 0 .. L, L = 2^(width - 1) - 1, stands for the position f(r) in [0, 1]. Gaps between
levels widen from the first to the last by `gap_ratio`: small values, of which a gradient has most,
get finer steps. Two spacings:

- `geometric`, the paper's (section 4): f(r) = (b^r - 1) / (b^L - 1), b = 1 + 2 e^2;
- `quadratic`: f(r) = r (linear + quadratic r), gaps that widen by the same amount each time. Equal
  in error within 2 %, and free of logarithms and long polynomials.

Rounding between neighbours is LINEAR in the value: rounding in the log domain is biased (+1.3 %
gain a hop at 2 bits).

What a width means to the formulas is a few numbers, so that rows of different widths can go through
one loop: they are float32 scalars, or columns [rows, 1] where every row has its own width.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Spacing = Literal["quadratic", "geometric"]
SPACINGS: tuple[str, ...] = get_args(Spacing)
Number = Array | np.float32 | float  # float only before `make_levels` rounds it

# Below the smaller ratio a float32 logarithm or root no longer finds the right level of 16 bits (at
# it, to 1/50 of a gap); above the larger one the polynomial is not exact to float32.
MIN_GAP_RATIO, MAX_GAP_RATIO = 1.1, 6.0


class QuadraticLevels(NamedTuple):
    """f(r) = r (linear + quadratic r)."""

    top: Number  # L, the largest magnitude code
    linear: Number
    quadratic: Number
    first_gap: Number  # f(r + 1) - f(r) = first_gap + growth r
    growth: Number
    slope: Number  # inverse: slope t + sqrt(square + span t) - shift
    span: Number
    square: Number
    shift: Number

    def position(self, code: Array) -> Array:
        """f(code), float32."""
        return code * (self.linear + code * self.quadratic)

    def below(self, t: Array) -> Array:
        """The largest code whose position is at most `t`, up to float32 precision."""
        root = jnp.sqrt(t * self.span + self.square)
        return jnp.floor(t * self.slope + (root - self.shift))

    def gap(self, code: Array, position: Array) -> Array:
        """f(code + 1) - f(code)."""
        return code * self.growth + self.first_gap


class GeometricLevels(NamedTuple):
    """f(r) = (b^r - 1) / (b^L - 1), as a polynomial exact to float32: it vectorises everywhere, and
    is the same on every backend up to the contraction of multiply-adds.
    """

    top: Number  # L, the largest magnitude code
    first_gap: Number  # f(r + 1) - f(r) = first_gap + growth f(r)
    growth: Number
    slope: Number  # inverse: slope t + log(1 + span t) / log(b)
    span: Number
    inverse_log_base: Number
    coefficients: tuple[Number, ...]  # f(r) = r * sum_i c[i] r^i

    def position(self, code: Array) -> Array:
        """f(code), float32."""
        *lower, value = self.coefficients
        for coefficient in reversed(lower):
            value = value * code + coefficient
        return value * code

    def below(self, t: Array) -> Array:
        """The largest code whose position is at most `t`, up to float32 precision."""
        logarithm = jnp.log(np.float32(1) + t * self.span)
        return jnp.floor(t * self.slope + logarithm * self.inverse_log_base)

    def gap(self, code: Array, position: Array) -> Array:
        """f(code + 1) - f(code)."""
        return position * self.growth + self.first_gap


Levels = QuadraticLevels | GeometricLevels


def round_to_level(t: Array, offset: Array | np.float32, levels: Levels) -> Array:
    """Rounds float32 positions `t` in [0, 1] to float32 codes in [0, L].

    Rounds up with the probability that makes the result unbiased when `offset` is uniform in [0,
    1): code = r + (offset * (f(r+1) - f(r)) < t - f(r)).
    """
    # A code one off at a boundary is harmless: t - f(r) is then ~0 or ~1 gap and rounds to the same
    # level.
    code = jnp.minimum(levels.below(t), levels.top - np.float32(1))
    position = levels.position(code)
    up = offset * levels.gap(code, position) < t - position
    return jnp.where(up, code + np.float32(1), code)


def num_levels(width: int) -> int:
    """Largest magnitude code L of a `width`-bit sign-magnitude code."""
    return 2 ** (width - 1) - 1 if width else 0


def make_levels(width: int, spacing: Spacing, gap_ratio: float) -> Levels:
    """Levels of a width; of width 0, a single one at zero. `gap_ratio` 1 is uniform."""
    top = num_levels(width)
    levels = _quadratic if spacing == "quadratic" else _geometric
    return jax.tree.map(np.float32, levels(top, gap_ratio if top > 1 else 1.0))


def levels_of_rows(classes: Sequence[Levels], class_of_row: Array) -> Levels:
    """Levels of every row as columns [rows, 1]: those of `classes[class_of_row]`, int32 [rows]."""
    table = np.array([jax.tree.leaves(levels) for levels in classes])
    numbers = jnp.asarray(table).at[class_of_row].get(mode="promise_in_bounds")
    columns = jnp.split(numbers, table.shape[1], axis=1)
    return jax.tree.unflatten(jax.tree.structure(classes[0]), columns)


def error_coefficient(width: int) -> float:
    """Expected squared error of a width relative to a row's squared norm, up to a common factor: ~
    1 / L^2.
    """
    return 1.0 / num_levels(width) ** 2 if width else 4.0


def _quadratic(top: int, gap_ratio: float) -> QuadraticLevels:
    growth = (gap_ratio - 1) / max(top - 1, 1)  # in first gaps
    quadratic = growth / 2
    linear = 1 - quadratic
    total = max(top, 1) * (linear + max(top, 1) * quadratic)
    uniform = gap_ratio == 1
    shift = 0 if uniform else linear / growth
    return QuadraticLevels(
        top=top,
        linear=linear / total,
        quadratic=quadratic / total,
        first_gap=1 / total,
        growth=growth / total,
        slope=top if uniform else 0,
        span=0 if uniform else total / quadratic,
        square=shift**2,
        shift=shift,
    )


def _geometric(top: int, gap_ratio: float) -> GeometricLevels:
    log_base = math.log(gap_ratio) / max(top - 1, 1)
    span = math.expm1(log_base * top)
    uniform = gap_ratio == 1
    return GeometricLevels(
        top=top,
        first_gap=1 / max(top, 1) if uniform else math.expm1(log_base) / span,
        growth=math.expm1(log_base),
        slope=top if uniform else 0,
        span=span,
        inverse_log_base=0 if uniform else 1 / log_base,
        coefficients=_geometric_coefficients(max(top, 1), log_base * top),
    )


def _geometric_coefficients(top: int, log_range: float, degree: int = 6) -> tuple[float, ...]:
    """Coefficients c of f(r) = r * sum_i c[i] r^i: through all levels if they are few, else fitted
    at Chebyshev points.
    """
    if log_range == 0:
        return (1 / top, *[0.0] * degree)
    if top <= degree + 1:
        points = np.arange(1, top + 1) / top
    else:
        points = 0.5 + 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    values = np.expm1(log_range * points) / (math.expm1(log_range) * points)
    fitted = np.polynomial.Polynomial.fit(
        points, values, min(degree, top - 1), domain=[0, 1], window=[0, 1]
    )
    coefficients = [c / top ** (i + 1) for i, c in enumerate(fitted.coef)]
    return (*coefficients, *[0.0] * (degree + 1 - len(coefficients)))
