"""Operands of a kernel that are numbers."""

import jax.numpy as jnp
from jax import Array


def scalar(value: Array | int) -> Array:
    """A number as a kernel reads it, int32 [1]: its operands are arrays in memory."""
    return jnp.asarray(value).astype(jnp.int32).reshape(1)
