"""JAX (jax#10828): programs clear the caches of JAX between phases to free memory, and go on."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="mxfp8")
grad_fn = jax.jit(jax.grad(mean_loss_fn))
before = grad_fn(w, x)
jax.clear_caches()
assert (grad_fn(w, x) == before).all(), "the compiled step"
assert (jax.jit(jax.grad(mean_loss_fn))(w, x) == before).all(), "a new trace of the same loss"
