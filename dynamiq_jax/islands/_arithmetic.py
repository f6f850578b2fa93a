"""Arithmetic of changes, and the places of what it makes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax.islands._shards import as_arrays, devices_of
from dynamiq_jax.islands.merging import wide


def on_all(outer: Any, params: Any) -> Any:
    """Return the state of an outer optimizer on the devices of parameters, its numbers on all."""
    leaves = jax.tree.leaves(params)
    meshes = [leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    if not meshes or len(devices_of(params)) == 1:
        return as_arrays(outer)
    everywhere = NamedSharding(meshes[0], PartitionSpec())

    def replicated(leaf: Any) -> Array:
        is_whole = np.ndim(leaf) == 0 or not isinstance(leaf, Array)
        return jax.device_put(leaf, everywhere) if is_whole else leaf

    return jax.tree.map(replicated, outer)


def placed(leaf: Array, before: Array) -> Array:
    """Return a leaf in the sharding of the one before, which a compiler writes in other words."""
    return leaf if leaf.sharding == before.sharding else jax.device_put(leaf, before.sharding)


def zeros_like(tree: Any) -> Any:
    """Return zeros in the shardings of a tree."""
    return jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), tree
    )


def on_devices(tree: Any) -> Any:
    """Return a tree in the memory of its devices."""
    return in_memory("device", tree)


def in_memory(kind: str, tree: Any) -> Any:
    """Return a tree in a kind of memory, such as "pinned_host"; as it is if it is there."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Array) or leaf.sharding.memory_kind == kind:
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))

    return jax.tree.map(moved, tree)


def delete(tree: Any, but: Any) -> None:
    """Free the memory of the arrays of a tree that are not in another one."""
    kept = {id(leaf) for leaf in jax.tree.leaves(but)}
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Array) and id(leaf) not in kept:
            leaf.delete()


@functools.partial(jax.jit, static_argnames="decay")
def change_of(start: Any, params: Any, residual: Any, decay: float) -> Any:
    """Return what an island has to send, float32 where leaves are narrower."""

    def change(before: Any, now: Any, left: Any) -> Any:
        return before - now + left * np.array(decay, left.dtype)

    return jax.tree.map(change, wide(start), wide(params), residual)


@jax.jit
def went_on(params: Any, start: Any, reference: Any) -> Any:
    """Return a reference with the change of this island since a start."""

    def moved(now: Any, before: Any, reference: Any, like: Any) -> Any:
        return (reference + (now - before)).astype(like.dtype)

    return jax.tree.map(moved, wide(params), wide(start), wide(reference), params)


@functools.partial(jax.jit, donate_argnames="applied")
def rest_of(wanted: Any, applied: Any) -> Any:
    """Return what was not applied; nothing where that is not finite."""

    def left(wanted: Any, applied: Any) -> Any:
        rest = wanted - applied
        return jnp.where(jnp.isfinite(rest), rest, jnp.zeros_like(rest))

    return jax.tree.map(left, wanted, applied)
