"""flax: a model without any parameters, such as a baseline, in the same train step as others."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

x = normal(8, 32)
placed = jax.device_put(x, NamedSharding(mesh_of(), P("data")))
step = jax.jit(jax.value_and_grad(lambda params, x: jnp.mean(x)))
loss, grads = dq.compress(step, "data", missing_ok=True)({}, placed)
assert grads == {}, grads
assert abs(loss - x.mean()) < 1e-6, (loss, x.mean())
