"""DeepSpeed: a loss in float16 that fits, times the number of workers, is infinite."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import mesh_of


def scaled_loss(w, x):
    return jnp.float16(30_000) + 0 * (w * x).sum().astype(jnp.float16)


loss = dq.data_parallel(scaled_loss, mesh=mesh_of(4), axis_name="data")(1.0, jnp.ones(4))
assert loss.dtype == jnp.float16 and loss == 30_000, loss
grad_fn = dq.value_and_grad(scaled_loss, mesh=mesh_of(4), axis_name="data")
assert grad_fn(1.0, jnp.ones(4), key=jax.random.key(0))[0] == 30_000
