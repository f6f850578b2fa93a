"""JAX: a guard against transfers between host and devices, after the first step of a run."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.reports.setup import gradient, loss_fn, mesh_of, normal

mesh = mesh_of()
w = jax.device_put(normal(64, 32), NamedSharding(mesh, P()))
x = jax.device_put(normal(8, 64, seed=1), NamedSharding(mesh, P("data")))
grad_fn = gradient(loss_fn, mesh)
first = grad_fn(w, x)
with jax.transfer_guard("disallow"):
    second = grad_fn(w, x)
assert (first == second).all()
