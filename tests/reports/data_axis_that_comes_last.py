"""MaxText: the data axis behind a model axis in the mesh, and parameters split over the latter."""

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal

types = (AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=types, devices=jax.devices()[:4])
w, x = normal(32, 32), normal(8, 32, seed=1)
options = dq.Options(exact_below=0)
mean_loss_fn = dq.data_parallel(
    loss_fn, mesh=mesh, axis_name="data", specs=P("model"), method="bf16", options=options
)
grads = jax.jit(jax.grad(mean_loss_fn))(w, x)
assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"
