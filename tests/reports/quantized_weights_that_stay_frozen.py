"""flax: a base model of 4-bit integers with scales that are trained (QLoRA)."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

params = {"codes": (3 * normal(64, 32)).astype(jnp.int4), "scales": jnp.linspace(0.5, 1, 32)}
x = normal(8, 64, seed=1)


def loss_fn(params, x):
    return jnp.mean((x @ (params["codes"].astype(jnp.float32) * params["scales"])) ** 2)


mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data")
grads = jax.grad(mean_loss_fn, allow_int=True)(params, x)
exact = jax.grad(loss_fn, allow_int=True)(params, x)
assert grads["codes"].dtype == jax.dtypes.float0, grads["codes"].dtype
assert dq.vnmse(grads["scales"], exact["scales"]) < 1e-9, "exact leaves have another gradient"
