"""Made-up gradients of any size on a device, most of which no host has to draw."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from dynamiq_jax._measurement.gradients import worker_gradient

_DRAWN = 4 * 2**20  # coordinates that the host draws; 1 Gi of them would take it half a minute


def device_gradient(worker: int, size: int, seed: int, dtype: str) -> Array:
    """Draw the gradient of a worker on the host, and repeat it on the device up to its size."""
    return _repeated(_drawn(worker, min(size, _DRAWN), seed), size=size, dtype=dtype)


@functools.lru_cache(maxsize=32)
def _drawn(worker: int, size: int, seed: int) -> NDArray[np.float32]:
    return worker_gradient(worker, size, seed)


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def _repeated(values: Array, *, size: int, dtype: str) -> Array:
    return jnp.resize(values.astype(dtype), (size,))
