"""JAX: adversarial examples need the gradient of the inputs, which a data-parallel loss splits."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")
of_params, of_batch = jax.jit(jax.grad(mean_loss_fn, argnums=(0, 1)))(w, x)
exact = jax.grad(loss_fn, argnums=(0, 1))(w, x)
assert dq.vnmse(of_params, exact[0]) < 1e-4, "the gradient of the parameters"
assert dq.vnmse(of_batch, exact[1]) < 1e-9, "the gradient of the batch"
