"""JAX: a mesh without the default device, on which new arrays are made."""

import jax
import numpy as np
from jax.sharding import Mesh

import dynamiq_jax as dq
from tests.reports.setup import gradient, loss_fn, normal

mesh = Mesh(np.array(jax.devices()[5:7]), ("data",))
w, x = normal(64, 32), normal(8, 64, seed=1)
grads = gradient(loss_fn, mesh)(w, x)
assert {d.id for d in grads.devices()} == {5, 6}, "the gradient is on other devices"
assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"
