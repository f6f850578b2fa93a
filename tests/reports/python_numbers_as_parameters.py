"""JAX: Python numbers among parameters are weakly typed, and a step compiles twice."""

import jax
import jax.numpy as jnp
import numpy as np

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

params = {"w": np.ones(32, np.float32), "temperature": 0.5}
x, traces = normal(8, 32), []


def loss_fn(params, x):
    traces.append(None)
    return jnp.mean((x @ params["w"]) ** 2) * params["temperature"]


grad_fn = jax.grad(dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data"))
plain = jax.grad(lambda params: jnp.mean((x @ params["w"]) ** 2) * params["temperature"])(params)
grads = grad_fn(params, x)
count = len(traces)
for name, leaf in plain.items():
    assert (grads[name].shape, grads[name].dtype) == (leaf.shape, leaf.dtype), name
assert dq.vnmse(grads, plain) < 1e-9, (grads["temperature"], plain["temperature"])
grad_fn({**params, "temperature": 0.7}, x)
assert len(traces) == count, "another number compiles the loss again"
