"""States of methods, by their names, and on a mesh."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.workers import first

SPECS = dq.AllReduceState(step=P(), method=P("data"), metrics=P())


def on_mesh(
    reduce: optax.GradientTransformation, mesh: Mesh, specs: Any = SPECS, **how: Any
) -> tuple[Any, Any]:
    """Jitted `init` and `update` over "data": of replicated parameters, and of stacked gradients
    and a state.
    """
    init = jax.shard_map(reduce.init, mesh=mesh, in_specs=P(), out_specs=specs, **how)
    update = jax.shard_map(
        lambda stacked, state: reduce.update(first(stacked), state),
        mesh=mesh,
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
        **how,
    )
    return jax.jit(init), jax.jit(update)


def only(state: dq.AllReduceState) -> Any:
    """The state of the method in a tree of one bucket."""
    (of_bucket,) = of_buckets(state).values()
    return of_bucket


def of_buckets(state: dq.AllReduceState) -> dict[str, Any]:
    """The states of the method by name, without the record of their worker."""
    return {name: state.method[name] for name in sorted(state.method) if name != "worker"}
