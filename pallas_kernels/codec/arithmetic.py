"""Elementary operations that each backend may implement differently.

The formulas of the codec take them as an argument, so that all backends share one set of formulas.
A backend's operation may differ from the plain one in the last bit of a float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# The low bits of a float32 between 2^23 and 2^24 are a whole number. Adding this constant makes
# an integer without a conversion, which costs a GPU more than arithmetic.
WHOLE = np.float32(1.5 * 2**23)

Index = Array | int  # a number that may be traced
Number = Array | np.float32 | float  # float only of constants that are rounded before use


class Arithmetic(NamedTuple):
    """Float32 operations."""

    multiply_add: Callable[[Array, Number, Number], Array]  # a b + c
    multiply_subtract: Callable[[Array, Number, Array], Array]  # a b - c
    multiply_to_one: Callable[[Array, Array], Array]  # min(a b, 1) of a b >= 0; NaN to anything
    sqrt: Callable[[Array], Array]  # of normal numbers
    reciprocal: Callable[[Array], Array]  # of normal numbers up to 2^126
    ceil: Callable[[Array], tuple[Array, Array]]  # of 0 to 255, and the bits of that + WHOLE
    nearest_whole: Callable[[Array], tuple[Array, Array]]  # rounded, and the bits of that + WHOLE


def code_to_float(code: Array) -> Array:
    """Convert whole numbers, uint32 below 2^22, to float32."""
    bits = code | np.uint32(WHOLE.view(np.uint32))
    return lax.bitcast_convert_type(bits, jnp.float32) - WHOLE


def float_to_code(value: Array) -> Array:
    """Invert `code_to_float`, for float32 whole numbers below 2^22."""
    bits = lax.bitcast_convert_type(value + WHOLE, jnp.uint32)
    return bits & np.uint32(2**22 - 1)


def nearest_whole(value: Array) -> tuple[Array, Array]:
    """Round to whole numbers by a sum, which kernels keep and XLA cancels; see `Arithmetic`."""
    whole = value + WHOLE
    return whole - WHOLE, lax.bitcast_convert_type(whole, jnp.uint32)


def _with_bits(whole: Array) -> tuple[Array, Array]:
    return whole, lax.bitcast_convert_type(whole + WHOLE, jnp.uint32)


PLAIN = Arithmetic(
    multiply_add=lambda a, b, c: a * b + c,
    multiply_subtract=lambda a, b, c: a * b - c,
    multiply_to_one=lambda a, b: jnp.minimum(a * b, np.float32(1)),
    sqrt=jnp.sqrt,
    reciprocal=lambda value: np.float32(1) / value,
    ceil=lambda value: _with_bits(jnp.ceil(value)),
    nearest_whole=lambda value: _with_bits(jnp.round(value)),
)
