"""L2 norms over the whole range of float32."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.codec.scales import LARGEST_BITS

LARGEST_UNIT = LARGEST_BITS.view(np.float32)  # hardware flushes the reciprocals of larger ones


def l2_norm(values: Array, axis: int) -> Array:
    """Compute sqrt(sum of squares) of float32 `values` along an axis; not finite where a value is
    not.

    Values are divided by the largest magnitude first: squares of 1e-30 or 1e30 leave the range of
    float32.
    """
    unit = jnp.minimum(jnp.max(jnp.abs(values), axis=axis, keepdims=True), LARGEST_UNIT)
    squares = jnp.sum((values * inverse_unit(unit)) ** 2, axis=axis)
    return jnp.squeeze(unit, axis) * jnp.sqrt(squares)


def inverse_unit(unit: Array) -> Array:
    """Return the factor that values are multiplied by before they are squared; `unit` is at most
    `LARGEST_UNIT`.
    """
    return jnp.where(unit > np.finfo(np.float32).tiny, 1 / unit, np.float32(1))
