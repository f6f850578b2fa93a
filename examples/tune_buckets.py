"""A step for `python -m benchmarks.speed.tune_buckets examples.tune_buckets:make_step`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

LAYERS, WIDTH, ROWS = 8, 512, 32
optimizer = optax.adamw(1e-3)


def loss_fn(layers, x):
    y = x
    for w in layers:
        y = y + jnp.tanh(y @ w)
    return jnp.mean(y**2)


def train_step(layers, opt_state, x):
    updates, opt_state = optimizer.update(jax.grad(loss_fn)(layers, x), opt_state, layers)
    return optax.apply_updates(layers, updates), opt_state


def make_step(bucket_bytes):
    """Return a function that runs one train step with buckets of some size."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    method = dq.Compression("bf16:ring:unroll=True", bucket_bytes=bucket_bytes)
    step = dq.compress(jax.jit(train_step, donate_argnums=(0, 1)), "data", method=method)
    layers = jax.device_put([jnp.eye(WIDTH) for _ in range(LAYERS)], NamedSharding(mesh, P()))
    x = jax.device_put(jnp.ones((ROWS * mesh.size, WIDTH)), NamedSharding(mesh, P("data")))
    state = layers, optimizer.init(layers)

    def run():
        nonlocal state
        state = step(*state, x)
        return state[0][0]  # to wait for

    return run
