"""flax: parameters in 8-bit floats, whose gradients have 8 bits too."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

w, x = normal(64, 32).astype(jnp.float8_e5m2), normal(8, 64, seed=1)


def loss_fn(w, x):
    return jnp.mean((x @ w.astype(jnp.float32)) ** 2)


grads = jax.grad(dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data"))(w, x)
exact = jax.grad(lambda w: loss_fn(w, x))(w)
assert grads.dtype == w.dtype, grads.dtype
assert dq.vnmse(grads, exact) < 0.06, dq.vnmse(grads, exact)  # of two roundings to 3 digits
