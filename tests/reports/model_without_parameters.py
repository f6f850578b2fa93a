"""flax: a model without any parameters, such as a baseline, in the same train step as others."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

x = normal(8, 32)
mean_loss_fn = dq.data_parallel(lambda params, x: jnp.mean(x), mesh=mesh_of(), axis_name="data")
loss, grads = jax.value_and_grad(mean_loss_fn)({}, x)
assert grads == {}, grads
assert abs(loss - x.mean()) < 1e-6, (loss, x.mean())
