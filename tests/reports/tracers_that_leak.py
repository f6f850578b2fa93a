"""JAX: a library keeps traced values in its caches, which `jax.checking_leaks` reports."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import gradient, loss_fn, mesh_of, normal, on_workers

w, x = normal(64, 32), normal(8, 64, seed=1)
with jax.checking_leaks():
    on_workers(lambda g: dq.pmean(g, "data", key=jax.random.key(0), method="bf16"), normal(2, 2048))
    grads = gradient(loss_fn, mesh_of())(w, x)
assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4
