"""The all-reduce as an optax transformation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dynamiq_jax._buckets import driver
from dynamiq_jax._buckets.axes import AxisName, find_axes
from dynamiq_jax._buckets.operations import AllReduce
from dynamiq_jax._buckets.options import Options, resolve
from dynamiq_jax._buckets.policy import Rules
from dynamiq_jax.methods import DynamiQ, Method, State
from dynamiq_jax.topologies import Topology


class AllReduceState(NamedTuple):
    """State of `all_reduce_gradients`: a plain pytree.

    Each array of `method` has a leading axis of size 1, the worker. Between calls of
    `jax.shard_map`, states of all workers lie side by side along it, for every method:

        specs = dq.AllReduceState(step=P(), method=P("data"), metrics=P())

    With `specs` of the gradients, the states of a worker's shards lie side by side too, split over
    the axes that split the gradients.
    """

    step: Array  # int32 scalar: steps taken, which with the seed make the key of a step
    method: tuple[State, ...]  # the method's state for each bucket; () if it has none
    metrics: Mapping[str, Array] = {}  # of the last step, float32 scalars; {} if it has none


def all_reduce_gradients(
    axis_name: AxisName,
    *,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    seed: int = 0,
    start_step: int = 0,
    specs: Any = None,
    options: Options = Options(),
) -> optax.GradientTransformation:
    """Average gradients over a mesh axis, compressed on the wire. Put it first in `optax.chain`.

        optimizer = optax.chain(dq.all_reduce_gradients("data"), optax.adamw(1e-3))

    `update` must run inside `jax.shard_map` (or `jax.vmap`) with the axis; so must `init` for a
    method that carries state. It takes the local gradients of each worker and returns their mean,
    the same on all workers.

    Args:
      axis_name: axis to average over, or several with the slowest link first; see `psum`.
      method: compression method; see `psum`.
      topology: route of the chunks; see `psum`.
      seed: seed of the rounding noise, the same on all workers.
      start_step: step that the first update counts as.
      specs: how gradients are split over axes that the compiler manages; see `psum`.
      options: leaves that stay exact, and the size of buckets.

    Returns:
      A transformation whose state holds the step, the method's state and its metrics. The state can
      be saved and restored like any pytree.
    """
    how = resolve(method, topology, options)

    def init(params: Any) -> AllReduceState:
        states, used = (), how.policy.used(params)
        if any(method.is_stateful for method in used):
            operation = AllReduce(find_axes(axis_name), mean=True)
            states = driver.first_states(operation, params, how, specs=specs)
        metrics = {name: jnp.zeros((), jnp.float32) for each in used for name in each.metrics}
        return AllReduceState(jnp.asarray(start_step, jnp.int32), states, metrics)

    def update(
        updates: Any, state: AllReduceState, params: Any = None
    ) -> tuple[Any, AllReduceState]:
        del params
        stateful = any(method.is_stateful for method in how.policy.used(updates))
        outcome = driver.run(
            AllReduce(find_axes(axis_name), mean=True),
            updates,
            jax.random.fold_in(jax.random.key(seed), state.step),
            how,
            specs=specs,
            states=state.method if stateful else None,
        )
        after = outcome.states if stateful else ()
        return outcome.tree, AllReduceState(state.step + 1, after, outcome.metrics)

    return optax.GradientTransformation(init, update)
