"""Workers, losses and steps of most reports."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq


def mesh_of(num_workers: int = 2) -> Mesh:
    devices = jax.devices()[:num_workers]
    return jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def on_workers(function: Callable[..., Any], *stacked: Any, check_vma: bool = False) -> Any:
    """Call a function on each worker of a mesh: arrays [workers, ...] to stacked results."""

    def local(stacked: Any) -> Any:
        result = function(*jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)

    mesh = mesh_of(len(jax.tree.leaves(stacked)[0]))
    specs = P("data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma)
    return jax.jit(mapped)(stacked)


def mean_of(
    stacked: Any, method: Any = "dynamiq:5", *, check_vma: bool = False, with_metrics: bool = False
) -> Any:
    """Return the mean of trees [workers, ...] that each worker of a mesh gets, by one key."""

    def mean(own: Any) -> Any:
        key = jax.random.key(0)
        return dq.pmean(own, "data", key=key, method=method, with_metrics=with_metrics)

    return on_workers(mean, stacked, check_vma=check_vma)


def train_step(tx: Any, loss_fn: Callable[..., Any], state_specs: Any = P()) -> Callable[..., Any]:
    """Return a step of two workers: `(params, state, x)` to new parameters and the new state."""

    def step(params: Any, state: Any, x: Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    specs = (P(), state_specs, P("data"))
    mapped = jax.shard_map(
        step, mesh=mesh_of(), in_specs=specs, out_specs=specs[:2], check_vma=False
    )
    return jax.jit(mapped)


def gradient(loss_fn: Callable[..., Any], mesh: Mesh, method: str = "bf16") -> Callable[..., Any]:
    """Return the gradient of a loss of parameters and rows, in a compressed step of all workers."""
    placed = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return dq.compress(jax.jit(jax.grad(loss_fn), in_shardings=placed), "data", method=method)


def normal(*shape: int, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def loss_fn(w: Array, x: Array) -> Array:
    return jnp.mean((x @ w) ** 2)


def evaluate(rank: int) -> None:
    """Take gradients on the devices of this process, one step more than in the one before."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    w, x = jnp.ones((64, 48 + 8 * rank)), jnp.ones((8, 64))
    for _ in range(1 + rank):
        grads = gradient(loss_fn, mesh)(w, x)
        assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4
