"""Gradients like a model's, and how far an estimate of their sum is off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.codec.packing import SUPER_GROUP_SIZE


@functools.partial(jax.jit, static_argnames=("size", "dtype"))
def make_gradient(row_key: Array, key: Array, *, size: int, dtype: str) -> Array:
    """Normal values whose super-groups differ in norm by factors of 2^2.5, as a model's do. Workers
    share `row_key`.
    """
    rows = -(-size // SUPER_GROUP_SIZE)
    magnitudes = jnp.exp2(np.float32(2.5) * jax.random.normal(row_key, (rows, 1)))
    values = magnitudes * jax.random.normal(key, (rows, SUPER_GROUP_SIZE))
    return values.reshape(-1)[:size].astype(dtype)


def key_of(*numbers: int) -> Array:
    """The same random key for the same numbers."""
    key = jax.random.key(7)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def host(array: Array) -> np.ndarray:
    """In float64, on the host."""
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def vnmse(estimate: Array, truth: np.ndarray) -> float:
    """As `dynamiq_jax.vnmse`, but in float64, on the host."""
    difference = host(estimate).reshape(-1) - truth.reshape(-1)
    return float(np.sum(difference**2) / np.sum(truth**2))
