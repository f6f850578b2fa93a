"""Magnitudes to codes and back: the quantizer's levels, and the rounding between them.

A code r = 0 .. L, L = 2^(width - 1) - 1, stands for the position f(r) in [0, 1]. Gaps between
levels widen from the first to the last by `gap_ratio`: a gradient has mostly small values, which
get finer steps. There are two spacings:

- `geometric`, the paper's (section 4): f(r) = (b^r - 1) / (b^L - 1), b = 1 + 2 e^2;
- `quadratic`: f(r) = r (linear + quadratic r), gaps that widen by the same amount each time. Its
  error is the same within 2 %, and it takes no logarithm and no long polynomial.

Rounding between neighbors is linear in the value. Rounding in the log domain would be biased
(+1.3 % gain a hop at 2 bits).

The formulas take a width as a few numbers, so that rows of different widths go through one loop.
The numbers are float32 scalars, or columns [rows, 1] where every row has its own width.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.platforms import platform_dependent
from pallas_kernels.codec.arithmetic import PLAIN, Arithmetic, Number, float_to_code

Spacing = Literal["quadratic", "geometric"]
SPACINGS: tuple[str, ...] = get_args(Spacing)

# Below this ratio a float32 logarithm or root no longer finds the right level of 16 bits.
MIN_GAP_RATIO = 1.1
# Above this ratio the polynomial is not exact to float32. Quadratic gaps must not grow by the first
# gap or more, at the fewest levels, 3: t = 0 would round to a code below 0.
MAX_GAP_RATIO = {"quadratic": 2.9, "geometric": 6.0}

# Relative error of `inverse`, with room. Subtracted from it, so that t = 1 never rounds to the code
# L, which has no gap above it.
_INVERSE_ERROR = 2.0**-21


class UniformLevels(NamedTuple):
    """Levels f(r) = r / L."""

    top: Number  # L, the largest magnitude code
    step: Number
    first_gap: Number  # step
    shift: Number  # 1/2 and a margin

    def position(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code), float32."""
        return code * self.step

    def above(self, code: Array, t: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code) - t, which may be rounded once."""
        return ops.multiply_subtract(code, self.step, t)

    def inverse(self, t: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f^-1(t) - 1/2.

        Rounded to a whole number it is the largest code whose position is at most `t`, or one less
        where `t` is a position up to float32 precision.
        """
        return ops.multiply_add(t, self.top, -self.shift)

    def gap(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code + 1) - f(code)."""
        return jnp.asarray(self.first_gap)


class QuadraticLevels(NamedTuple):
    """Levels f(r) = r (linear + quadratic r)."""

    top: Number
    linear: Number
    quadratic: Number
    first_gap: Number  # f(r + 1) - f(r) = first_gap + growth r
    growth: Number
    span: Number  # f^-1(t) - 1/2 = sqrt(square + span t) - shift
    square: Number
    shift: Number

    def position(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code), float32."""
        return code * self._slope(code, ops)

    def above(self, code: Array, t: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code) - t, which may be rounded once."""
        return ops.multiply_subtract(code, self._slope(code, ops), t)

    def inverse(self, t: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f^-1(t) - 1/2; see `UniformLevels`."""
        return ops.sqrt(ops.multiply_add(t, self.span, self.square)) - self.shift

    def gap(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code + 1) - f(code)."""
        return ops.multiply_add(code, self.growth, self.first_gap)

    def _slope(self, code: Array, ops: Arithmetic) -> Array:
        return ops.multiply_add(code, self.quadratic, self.linear)


class GeometricLevels(NamedTuple):
    """Levels f(r) = (b^r - 1) / (b^L - 1).

    f is a polynomial, exact to float32: it vectorizes everywhere, and is the same on every backend
    up to the contraction of multiply-adds.
    """

    top: Number
    first_gap: Number  # f(r + 1) - f(r) = first_gap + growth f(r)
    growth: Number
    span: Number  # f^-1(t) = log(1 + span t) / log(b)
    inverse_log_base: Number
    shift: Number  # 1/2 and a margin
    coefficients: tuple[Number, ...]  # f(r) = r * sum_i c[i] r^i

    def position(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code), float32."""
        *lower, value = self.coefficients
        for coefficient in reversed(lower):
            value = ops.multiply_add(code, value, coefficient)
        return value * code

    def inverse(self, t: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f^-1(t) - 1/2; see `UniformLevels`."""
        logarithm = jnp.log(ops.multiply_add(t, self.span, np.float32(1)))
        return ops.multiply_add(logarithm, self.inverse_log_base, -self.shift)

    def above(self, code: Array, t: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code) - t, which may be rounded once."""
        return self.position(code, ops) - t

    def gap(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code + 1) - f(code)."""
        return ops.multiply_add(self.position(code, ops), self.growth, self.first_gap)


class TabulatedLevels(NamedTuple):
    """Positions of all levels in a table, for decoding alone.

    The others add to a product. A compiler may fuse the two, and then rounds once instead of twice.
    """

    table: Array  # float32, the levels of one width after those of another
    start: Array  # of the width of every row, int32 [rows, 1]

    def position(self, code: Array, ops: Arithmetic = PLAIN) -> Array:
        """Return f(code), float32."""
        return self.table.at[self.start + float_to_code(code).astype(jnp.int32)].get(mode="clip")


Levels = UniformLevels | QuadraticLevels | GeometricLevels


def round_to_level(
    t: Array, offset: Array | np.float32, levels: Levels, ops: Arithmetic = PLAIN
) -> Array:
    """Round float32 positions `t` in [0, 1] to codes in [0, L], uint32; NaN to any of them.

    Rounds up with the probability that makes the result unbiased when `offset` is uniform in
    [0, 1): code = r + (offset * (f(r+1) - f(r)) < t - f(r)).
    """
    return level_bits(t, offset, levels, ops) & top_code(levels)


def level_bits(
    t: Array, offset: Array | np.float32, levels: Levels, ops: Arithmetic = PLAIN
) -> Array:
    """Compute `round_to_level` plus the bits of `arithmetic.WHOLE`; anything of NaN."""
    # Where t is a position, r may be one too small. This is harmless: t - f(r) is then about one
    # gap, and rounds to the same level.
    code, bits = ops.nearest_whole(levels.inverse(t, ops))
    short = ops.multiply_add(levels.gap(code, ops), offset, levels.above(code, t, ops))
    up = lax.bitcast_convert_type(short, jnp.uint32) >> np.uint32(31)
    return bits + up


def scale_gaps(levels: Levels, factor: np.float32) -> Levels:
    """Multiply the gaps by a power of two, for offsets that are divided by it."""
    names = [name for name in ("first_gap", "growth") if factor != 1 and name in levels._fields]
    return levels._replace(**{name: getattr(levels, name) * factor for name in names})


def top_code(levels: Levels) -> Array:
    """Return L as uint32, which is also the mask of a magnitude."""
    return float_to_code(jnp.asarray(levels.top))


def num_levels(width: int) -> int:
    """Return the largest magnitude L of a `width`-bit sign-magnitude code."""
    return 2 ** (width - 1) - 1 if width else 0


def make_levels(width: int, spacing: Spacing, gap_ratio: float) -> Levels:
    """Return the levels of a width; `gap_ratio` 1 is uniform, and width 0 has a single code."""
    top = max(num_levels(width), 1)
    levels: Levels
    if gap_ratio == 1:
        levels = UniformLevels(top, 1 / top, 1 / top, shift=0.5 + top * _INVERSE_ERROR)
    else:
        levels = (_quadratic if spacing == "quadratic" else _geometric)(top, gap_ratio)
    return jax.tree.map(np.float32, levels._replace(top=num_levels(width)))


def position_table(width: int, spacing: Spacing, gap_ratio: float) -> np.ndarray:
    """Return f(0) .. f(L) of a width, computed in float64 and rounded: float32 [L + 1]."""
    top = num_levels(width)
    codes = np.arange(top + 1, dtype=np.float64)
    if top < 2 or gap_ratio == 1:
        return (codes / max(top, 1)).astype(np.float32)
    if spacing == "quadratic":
        growth = (gap_ratio - 1) / (top - 1) / 2
        positions = codes * (1 + (codes - 1) * growth) / (top * (1 + (top - 1) * growth))
    else:
        log_base = math.log(gap_ratio) / (top - 1)
        positions = np.expm1(log_base * codes) / math.expm1(log_base * top)
    return positions.astype(np.float32)


def levels_of_rows(table: Sequence[Levels], index_of_row: Array) -> Levels:
    """Return the levels of every row, `table[index_of_row]`, as columns [rows, 1]."""
    ways = {"cpu": gather_levels, "default": select_levels}
    functions = {platform: functools.partial(way, table) for platform, way in ways.items()}
    return platform_dependent(functions, index_of_row)


def gather_levels(table: Sequence[Levels], index_of_row: Array) -> Levels:
    """Compute `levels_of_rows` by a gather, which a CPU compiles faster than selections."""
    numbers = np.array([jax.tree.leaves(levels) for levels in table])
    columns = jnp.asarray(numbers).at[index_of_row].get(mode="promise_in_bounds")
    split = jnp.split(columns, numbers.shape[1], axis=1)
    return jax.tree.unflatten(jax.tree.structure(table[0]), split)


def select_levels(table: Sequence[Levels], index_of_row: Array) -> Levels:
    """Compute `levels_of_rows` by selections: a TPU is slow to gather from a table."""
    index = index_of_row[:, None]

    def column(*numbers: Number) -> Array:
        column = jnp.full(index.shape, numbers[0])
        for position, number in enumerate(numbers[1:], start=1):
            column = jnp.where(index == position, number, column)
        return column

    return jax.tree.map(column, *table)


def distortion(width: int) -> float:
    """Return a number to which the expected squared error of a width is proportional.

    With the default levels, it is so for all widths within 15 %. A row that is dropped counts as
    its squared norm.
    """
    return 1.0 / num_levels(width) ** 2 if width else 1.0


def _quadratic(top: int, gap_ratio: float) -> QuadraticLevels:
    if top == 1:  # a single gap: whatever `t` is, the code below is 0
        return QuadraticLevels(1, 1, 0, first_gap=1, growth=0, span=0, square=0, shift=0.5)
    growth = (gap_ratio - 1) / (top - 1)  # in first gaps
    linear, quadratic = 1 - growth / 2, growth / 2
    total = top * (linear + top * quadratic)
    return QuadraticLevels(
        top=top,
        linear=linear / total,
        quadratic=quadratic / total,
        first_gap=1 / total,
        growth=growth / total,
        span=total / quadratic,
        square=(linear / growth) ** 2,
        shift=linear / growth + 0.5 + (linear / growth + top) * _INVERSE_ERROR,
    )


def _geometric(top: int, gap_ratio: float) -> GeometricLevels:
    if top == 1:
        polynomial = _geometric_coefficients(1, 0.0)
        return GeometricLevels(1, 1, 0, 0, 0, shift=0.5, coefficients=polynomial)
    log_base = math.log(gap_ratio) / (top - 1)
    span = math.expm1(log_base * top)
    return GeometricLevels(
        top=top,
        first_gap=math.expm1(log_base) / span,
        growth=math.expm1(log_base),
        span=span,
        inverse_log_base=1 / log_base,
        shift=0.5 + top * _INVERSE_ERROR,
        coefficients=_geometric_coefficients(top, log_base * top),
    )


def _geometric_coefficients(top: int, log_range: float, degree: int = 6) -> tuple[float, ...]:
    """Return the coefficients c of f(r) = r * sum_i c[i] r^i.

    They are exact at all levels if these are few, and otherwise fitted at Chebyshev points.
    """
    if log_range == 0:
        return (1 / top, *[0.0] * degree)
    if top <= degree + 1:
        points = np.arange(1, top + 1) / top
    else:
        points = 0.5 + 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    values = np.expm1(log_range * points) / (math.expm1(log_range) * points)
    terms = min(degree, top - 1)
    fitted = np.polynomial.Polynomial.fit(points, values, terms, domain=[0, 1], window=[0, 1])
    coefficients = [c / top ** (i + 1) for i, c in enumerate(fitted.coef)]
    return (*coefficients, *[0.0] * (degree + 1 - len(coefficients)))
