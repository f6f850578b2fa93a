"""A flax step for `jax.pmap`, as many programs have it, exact and compressed: one line differs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training.train_state import TrainState

import dynamiq_jax as dq

model = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(64)])
x = jax.random.normal(jax.random.key(0), (jax.device_count(), 64, 128))
y = jnp.tanh(x[..., :64] * x[..., 64:])


def train_step(state, x, y):
    def loss_fn(params):
        return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


exact_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
compressed_step = dq.compress(exact_step, "batch")

params = model.init(jax.random.key(1), x[0])
first = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
losses = []
for step in (exact_step, compressed_step):
    state = jax_utils.replicate(first)
    for _ in range(30):
        state, loss = step(state, x, y)
    losses.append(float(loss[0]))
print(f"{losses[1] / losses[0]:.1f} times the exact loss")  # 1.0 times the exact loss
