"""Moshpit: eight peers on a 4 x 2 grid train together, although some of them leave for a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_research

# As many peers as there are devices: 8 on a 4 x 2 grid, 4 on a 2 x 2 grid.
mesh = jax.make_mesh((jax.device_count() // 2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
peers = P(("x", "y"))
optimizer = optax.adam(3e-2)
target = jax.random.normal(jax.random.key(0), (32, 16))


def loss_fn(w, x):
    return jnp.mean((x @ (w - target)) ** 2)


def train_step(carry, x, alive, key):
    w, opt_state = jax.tree.map(lambda leaf: leaf[0], carry)
    updates, opt_state = optimizer.update(jax.grad(loss_fn)(w, x), opt_state)
    w = optax.apply_updates(w, updates)
    # The peers that are here average their parameters. One that is not keeps its own.
    w = dynamiq_research.moshpit_mean(w, ("x", "y"), key=key, alive=alive[0])
    return jax.tree.map(lambda leaf: leaf[None], (w, opt_state))


def train(mesh, carry, seed, steps):
    own = (peers, peers, peers, P())
    step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=own, out_specs=peers))
    rng, failures = np.random.default_rng(seed), 0
    for number in range(steps):
        x = rng.normal(size=(mesh.size * 16, 32)).astype(np.float32)
        alive = rng.random(mesh.size) > 0.05  # in practice, who has announced that it leaves
        failures += not alive.all()
        carry = step(carry, x, alive, jax.random.fold_in(jax.random.key(seed), number))
    return carry, failures


w = jnp.zeros((32, 16))
carry = jax.tree.map(lambda leaf: jnp.stack([leaf] * mesh.size), (w, optimizer.init(w)))
carry, failures = train(mesh, carry, seed=0, steps=400)
x = jax.random.normal(jax.random.key(1), (256, 32))
losses = [float(loss_fn(w, x)) for w in carry[0]]
print(f"over 50 steps had dead peers: {failures > 50}")  # over 50 steps had dead peers: True
print(f"loss below 0.1 for all peers: {max(losses) < 0.1}")  # loss below 0.1 for all peers: True
