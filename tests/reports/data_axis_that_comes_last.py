"""MaxText: the data axis behind a model axis in the mesh, and parameters split over the latter."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal

types = (AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=types, devices=jax.devices()[:4])
w, x = normal(32, 32), normal(8, 32, seed=1)
whole, rows = NamedSharding(mesh, P("model")), NamedSharding(mesh, P("data"))
step = jax.jit(jax.grad(loss_fn), in_shardings=(whole, rows), out_shardings=whole)
grads = dq.compress(step, "data", method="bf16")(w, x)
assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"
