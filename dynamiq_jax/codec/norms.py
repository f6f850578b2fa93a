"""L2 norms over the whole range of float32."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def l2_norm(values: Array, axis: int) -> Array:
    """sqrt(sum of squares) of float32 `values` along an axis; not finite where a value is not.

    Scaled by the largest magnitude: squares of 1e-30 or 1e30 leave the range of float32.
    """
    largest = jnp.max(jnp.abs(values), axis=axis, keepdims=True)
    squares = jnp.sum((values * scale_of(largest)) ** 2, axis=axis)
    return jnp.squeeze(largest, axis) * jnp.sqrt(squares)


def scale_of(largest: Array) -> Array:
    """What values are multiplied by before they are squared."""
    return jnp.where(largest > np.finfo(np.float32).tiny, 1 / largest, np.float32(1))
