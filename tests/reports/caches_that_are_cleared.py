"""JAX (jax#10828): programs clear the caches of JAX between phases to free memory, and go on."""

import jax

from tests.reports.setup import gradient, loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
grad_fn = gradient(loss_fn, mesh_of(), "mxfp8")
before = grad_fn(w, x)
jax.clear_caches()
assert (grad_fn(w, x) == before).all(), "the compiled step"
assert (jax.jit(grad_fn)(w, x) == before).all(), "a new trace of the same step"
