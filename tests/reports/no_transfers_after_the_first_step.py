"""JAX: a guard against transfers between host and devices, after the first step of a run."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

mesh = mesh_of()
w = jax.device_put(normal(64, 32), NamedSharding(mesh, P()))
x = jax.device_put(normal(8, 64, seed=1), NamedSharding(mesh, P("data")))
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data", method="bf16")
grad_fn = jax.jit(jax.grad(mean_loss_fn))
first = grad_fn(w, x)
with jax.transfer_guard("disallow"):
    second = grad_fn(w, x)
assert (first == second).all()
