"""JAX: a compiled step is saved, so that a restarted job need not compile it again."""

import jax
from jax.experimental import serialize_executable

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(16, 64, seed=1)
mesh = mesh_of(8)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data", method="mxfp8")
compiled = jax.jit(jax.grad(mean_loss_fn)).lower(w, x).compile()
loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
placed = jax.device_put((w, x), compiled.input_shardings[0])
assert (loaded(*placed) == compiled(*placed)).all(), "the loaded step has other bits"
