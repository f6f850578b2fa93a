"""A step for `python -m benchmarks.speed.tune_buckets examples.tune_buckets:make_step`."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

LAYERS, WIDTH, ROWS = 8, 512, 32


def loss_fn(layers, x):
    y = x
    for w in layers:
        y = y + jnp.tanh(y @ w)
    return jnp.mean(y**2)


def make_step(bucket_bytes):
    """Return a function that runs one pipelined step with buckets of some size."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    pipelined = dq.training.Pipelined(
        optimizer=optax.adamw(1e-3),
        axis_name="data",
        method=dq.Compression("bf16:ring:unroll=True", bucket_bytes=bucket_bytes),
    )
    specs = pipelined.state_specs

    def train_step(state, x):
        return pipelined.step(lambda layers: ((), jax.grad(loss_fn)(layers, x)), state)[1]

    init = jax.shard_map(pipelined.init, mesh=mesh, in_specs=P(), out_specs=specs)
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    step = jax.jit(mapped, donate_argnums=0)
    state = jax.jit(init)([jnp.eye(WIDTH)] * LAYERS)
    x = jnp.ones((ROWS * mesh.size, WIDTH))

    def run():
        nonlocal state
        state = step(state, x)
        return state.step  # to wait for

    return run
