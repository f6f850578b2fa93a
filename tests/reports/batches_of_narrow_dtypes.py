"""JAX: a batch of 4-bit integers, 8-bit floats or booleans, which few operations accept."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

w, numbers = normal(64, 32), jnp.abs(4 * normal(8, 64, seed=1))


def loss_fn(w, x):
    return jnp.mean((x.astype(jnp.float32) @ w) ** 2)


for dtype in (jnp.uint4, jnp.float8_e4m3fn, jnp.bool_):
    x = numbers.astype(dtype)
    mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")
    grads = jax.jit(jax.grad(mean_loss_fn))(w, x)
    assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, dtype
