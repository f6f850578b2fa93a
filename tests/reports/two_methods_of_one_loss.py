"""JAX: two wrappers of one function share a compiled program, since caches compare the function."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import gradient, loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
exact, rounded = (gradient(loss_fn, mesh_of(), method) for method in ("exact", "bf16"))
grads = jax.jit(lambda w: (exact(w, x), rounded(w, x)))(w)
errors = [float(dq.vnmse(each, jax.grad(loss_fn)(w, x))) for each in grads]
assert errors[0] < 1e-10 < errors[1] < 1e-4, errors
