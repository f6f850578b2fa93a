"""JAX: a compiled step is saved, so that a restarted job need not compile it again."""

import jax
from jax.experimental import serialize_executable

from tests.reports.setup import gradient, loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(16, 64, seed=1)
mesh = mesh_of(8)
compiled = gradient(loss_fn, mesh, "mxfp8").lower(w, x).compile()
loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
placed = jax.device_put((w, x), compiled.input_shardings[0])
assert (loaded(*placed) == compiled(*placed)).all(), "the loaded step has other bits"
