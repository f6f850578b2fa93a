"""A flax step under `jax.jit`, as JAX's guides write it, exact and compressed: one line differs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(64)])
x = jax.random.normal(jax.random.key(0), (256, 128))
x, y = jax.device_put((x, jnp.tanh(x[:, :64] * x[:, 64:])), NamedSharding(mesh, P("data")))


def train_step(state, x, y):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


exact_step = jax.jit(train_step)
compressed_step = dq.compress(exact_step, "data")

params = model.init(jax.random.key(1), x)
first = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
first = jax.device_put(first, NamedSharding(mesh, P()))
losses = []
for step in (exact_step, compressed_step):
    state = first
    for _ in range(30):
        state, loss = step(state, x, y)
    losses.append(float(loss))
print(f"{losses[1] / losses[0]:.1f} times the exact loss")  # 1.0 times the exact loss
