"""Two ways to run one per-worker function: simulated by vmap, and on a mesh of devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.topologies import FixedTopology, resolve_topology

# Two width classes compile in a third of the time of the default's eight, on the same code path.
TWO_CLASSES = dq.DynamiQ(bits=6.0, widths=(4, 8))

PerWorker = Callable[..., Any]  # (key, *local trees) -> local tree


def simulated(fn: PerWorker) -> Callable[..., Any]:
    """`fn` on all workers at once, on one device: `(key, *stacked trees)` to a stacked tree."""

    def run(key: jax.Array, *stacked: Any) -> Any:
        return jax.vmap(lambda *local: fn(key, *local), axis_name="data")(*stacked)

    return jax.jit(run)


def on_mesh(fn: PerWorker, mesh: Mesh, *, check_vma: bool = True) -> Callable[..., Any]:
    """The same on the devices of a mesh, one worker each. Every replica's own copy comes back."""

    def local(key: jax.Array, stacked: tuple[Any, ...]) -> Any:
        result = fn(key, *jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: leaf[None], result)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma
    )
    jitted = jax.jit(mapped)
    return lambda key, *stacked: jitted(key, stacked)


def call_on(
    size: int, num_workers: int, topology: FixedTopology | str = "ring", **options: Any
) -> Call:
    """Return the call of a bucket over the axis "data", for tests that call a method directly."""
    topology = resolve_topology(topology)
    return Call(size=size, axis=Axis("data", num_workers), topology=topology, **options)
