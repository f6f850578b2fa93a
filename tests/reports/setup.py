"""Eight devices for a script that runs alone, and the workers of most scripts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

if jax.config.jax_num_cpu_devices < 2:  # none yet: `tests/plugin.py` makes them for pytest
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


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
