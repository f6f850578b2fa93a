"""optax: complex parameters, whose gradient has a convention of its own for the conjugate."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

params = {"mixing": normal(32, 4) + 1j * normal(32, 4, seed=1), "bias": normal(4, seed=2)}
x = normal(8, 32, seed=3)


def loss_fn(params, x):
    return jnp.mean(jnp.abs(x @ params["mixing"] + params["bias"]) ** 2)


grads = jax.grad(dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data"))(params, x)
exact = jax.grad(loss_fn)(params, x)
assert dq.vnmse(grads, exact) < 1e-9, (grads["mixing"][0, 0], exact["mixing"][0, 0])
