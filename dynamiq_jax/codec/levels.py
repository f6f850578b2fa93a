"""The quantizer's magnitude levels and the rounding between them.

    f(r) = ((1 + 2 e^2)^r - 1) / ((1 + 2 e^2)^L - 1),   r = 0 .. L,   L = 2^(width - 1) - 1

(paper, section 4): geometric spacing, e = 0 is uniform. Rounding between neighbours is LINEAR in
the value: rounding in the log domain is biased (+1.3 % gain a hop at 2 bits).
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

# f(r) / r is smooth and varies by a factor of 2 or 3 over the range, so this degree is exact to
# float32. A polynomial rather than `exp`: it vectorises everywhere and is the same on every backend
# up to the contraction of multiply-adds.
_DEGREE = 6
MAX_GAP_RATIO = 7.0  # (1 + 2 e^2)^L up to which the polynomial is exact to float32


def num_levels(width: int) -> int:
    """Largest magnitude code L of a `width`-bit sign-magnitude code."""
    return 2 ** (width - 1) - 1 if width else 0


def level(magnitude: Array, width: int, nonuniformity: float) -> Array:
    """f(magnitude): float32 codes in [0, L] to float32 positions in [0, 1], relative error under
    2^-21.
    """
    coefficients = _coefficients(width, nonuniformity)
    value = jnp.full_like(magnitude, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * magnitude + np.float32(coefficient)
    return value * magnitude


def round_to_level(t: Array, offset: Array | np.float32, width: int, nonuniformity: float) -> Array:
    """Rounds float32 positions `t` in [0, 1] to float32 codes in [0, L].

    Rounds up with the probability that makes the result unbiased when `offset` is uniform in [0,
    1): code = r + (offset * (f(r+1) - f(r)) < t - f(r)).
    """
    top = num_levels(width)
    log_base = math.log1p(2 * nonuniformity**2)
    if top == 1 or log_base == 0:
        position = t * np.float32(top)
        code = jnp.minimum(jnp.floor(position), np.float32(top - 1))
        return code + (offset < position - code).astype(jnp.float32)
    span = math.expm1(log_base * top)
    # An estimate that lands one level off at a boundary is harmless: t - f(r) is then ~0 or ~1
    # spacing and rounds to the same level.
    code = jnp.floor(jnp.log(np.float32(1) + t * np.float32(span)) * np.float32(1 / log_base))
    code = jnp.minimum(code, np.float32(top - 1))
    below = level(code, width, nonuniformity)
    base_minus_1 = 2 * nonuniformity**2
    spacing = below * np.float32(base_minus_1) + np.float32(base_minus_1 / span)
    return code + (offset * spacing < t - below).astype(jnp.float32)


def error_coefficient(width: int) -> float:
    """Expected squared error of a width relative to a row's squared norm, up to a common factor: ~
    1 / L^2.
    """
    return 1.0 / num_levels(width) ** 2 if width else 4.0


def _coefficients(width: int, nonuniformity: float) -> list[float]:
    """Coefficients c of f(r) = r * sum_i c[i] r^i, fitted at Chebyshev points."""
    top = num_levels(width)
    log_range = math.log1p(2 * nonuniformity**2) * top
    if top == 1 or log_range == 0:
        return [1 / top]
    points = 0.5 + 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    fitted = np.polynomial.Polynomial.fit(
        points,
        np.expm1(log_range * points) / (math.expm1(log_range) * points),
        _DEGREE,
        domain=[0, 1],
        window=[0, 1],
    )
    return [c / top ** (i + 1) for i, c in enumerate(fitted.coef)]
