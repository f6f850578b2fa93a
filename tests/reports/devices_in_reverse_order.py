"""JAX: a mesh whose devices are not in the order of their numbers, as topologies choose it."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal

mesh = Mesh(np.array(jax.devices()[3::-1]), ("data",))
w, x = normal(32, 32), normal(8, 32, seed=1)
placed = jax.device_put((w, x), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
with_rows = jax.grad(lambda w, x: (loss_fn(w, x), x @ w), has_aux=True)
grads, rows = dq.compress(jax.jit(with_rows), "data", method="bf16")(*placed)
assert dq.vnmse(rows, x @ w) < 1e-9, "rows of aux are in another order than the batch"
assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"
