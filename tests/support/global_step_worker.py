"""One process of tests/compress/test_global_processes.py: a global step, without a map."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.workers import mesh_of

ROWS = 32


class Model(nn.Module):
    """Statistics of the whole batch: sums that the compiler places stand between ours."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(64)(x)))
        return nn.Dense(32)(nn.BatchNorm(use_running_average=False)(nn.Dense(64)(x)))


def train(rank: int, steps: int, method: Any) -> tuple[list[float], list[np.ndarray]]:
    """Train on all devices of all processes, and return losses and parameters."""
    mesh = mesh_of(data=jax.device_count())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 32)).astype(np.float32)
    model, optimizer = Model(), optax.sgd(0.1, momentum=0.9)
    variables = model.init(jax.random.key(0), x)

    def step(state, x, y):
        params, stats, momentum = state

        def loss_fn(params):
            variables = {"params": params, "batch_stats": stats}
            out, after = model.apply(variables, x, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), after["batch_stats"]

        (loss, after), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, momentum = optimizer.update(gradient, momentum, params)
        return (optax.apply_updates(params, updates), after, momentum), loss

    def placed(value, spec):
        value = np.asarray(value)
        return jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, spec), lambda index: value[index]
        )

    first = variables["params"], variables["batch_stats"], optimizer.init(variables["params"])
    state = jax.tree.map(lambda leaf: placed(leaf, P()), first)
    batch = placed(x, P("data")), placed(np.tanh(x[:, ::-1]), P("data"))
    compressed = dq.compress(jax.jit(step), "data", method=method)
    losses = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            state, loss = compressed(state, *batch)
            losses.append(float(loss))
    params = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state[0])]
    return losses, params
