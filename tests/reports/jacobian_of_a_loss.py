"""JAX: jacrev in place of grad, which runs the backward pass and its collectives under vmap."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")
found = jax.jit(jax.jacrev(mean_loss_fn))(w, x)
assert dq.vnmse(found, jax.grad(loss_fn)(w, x)) < 1e-4, "the Jacobian is not the gradient"
