"""Lossy links: four devices train a small network, and one of ten packets is lost.

It simulates: the collectives of JAX are reliable, and lost packets are ignored.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_research import LossyChannel, LossyCollectives, drift

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
optimizer = optax.adam(3e-3)
lossy = LossyCollectives(
    axis_name="data",
    channel=LossyChannel(rate=0.1, burst=3.0, packet_bytes=256),
    method=dq.DynamiQ(bits=5),
)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - jnp.sin(x[:, :8])) ** 2)


def worker(params, key):
    """Train one worker for 300 steps, which starts with the parameters of all."""
    opt_state = optimizer.init(lossy.own_parts(params))

    def step(state, key):
        params, opt_state = state
        data_key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        loss, gradient = jax.value_and_grad(loss_fn)(params, jax.random.normal(data_key, (32, 64)))
        own = lossy.own_parts(params)  # this worker updates these alone
        mean = lossy.scatter_mean(gradient, key=key)
        updates, opt_state = optimizer.update(mean, opt_state, own)
        params = lossy.broadcast(optax.apply_updates(own, updates), params, key=key)
        return (params, opt_state), (jax.lax.pmean(loss, "data"), drift(params, "data"))

    _, history = jax.lax.scan(step, (params, opt_state), jax.random.split(key, 300))
    return history


params = {"in": jax.random.normal(jax.random.key(0), (64, 128)) / 8, "out": jnp.zeros((128, 8))}
train = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
losses, drifts = train(params, jax.random.key(1))
print(f"loss {losses[0]:.1f}, then {losses[-20:].mean():.2f}")  # loss 0.4, then 0.04
early, late = drifts[50:100].mean(), drifts[-50:].mean()
print("drift below 1e-6:", bool(late < 1e-6))  # drift below 1e-6: True
print("the difference grows:", bool(late > 2 * early))  # the difference grows: False
