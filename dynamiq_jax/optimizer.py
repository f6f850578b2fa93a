"""The all-reduce as an optax transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dynamiq_jax import buckets, collectives
from dynamiq_jax.axes import AxisName
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.methods.base import State
from dynamiq_jax.topologies import Auto, Topology


class AllReduceState(NamedTuple):
    """State of `all_reduce_gradients`: a plain pytree.

    Each array of `method` has a leading axis of size 1, the worker. Between calls of
    `jax.shard_map`, states of all workers lie side by side along it, whatever the method:

        specs = dq.AllReduceState(step=P(), method=P("data"))
    """

    step: Array  # int32 scalar: steps taken, which with the seed makes the key of a step
    method: tuple[State, ...]  # the method's own state for each bucket; () if it has none


def all_reduce_gradients(
    axis_name: AxisName,
    *,
    method: Method | str = DynamiQ(),
    topology: Topology | Auto | str = "ring",
    seed: int = 0,
    start_step: int = 0,
    mask: Any | Callable[[Any], Any] | None = None,
    exact_below: int = buckets.EXACT_BELOW,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> optax.GradientTransformation:
    """Averages gradients over an axis, compressed on the wire. Put it first in `optax.chain`.

        optimizer = optax.chain(dq.all_reduce_gradients("data"), optax.adamw(1e-3))

    `update` must run inside `jax.shard_map` (or `jax.vmap`) with the axis; so must `init` for a
    method that carries state. Gradients come in local, one per worker, and go out as their mean,
    the same on all workers.

    Args:
      axis_name: axis to average over, or several with the slowest link first; see `psum`.
      method: how numbers become bytes.
      topology: how chunks travel.
      seed: of the rounding noise; the same on all workers.
      start_step: step that the first update counts as.
      mask: pytree of bools like the gradients (a prefix will do), or a function from gradients to
        one: leaves marked False are averaged exactly.
      exact_below: leaves of fewer elements are averaged exactly.
      bucket_bytes: bytes of gradient that are compressed together; see `psum`.

    Returns:
      A transformation whose state holds the step and the method's state; it can be saved and
      restored like any pytree.
    """
    options = buckets.resolve_options(method, topology, exact_below, bucket_bytes)
    stateful = options.method.is_stateful

    def init(params: Any) -> AllReduceState:
        states = ()
        if stateful:
            flags = buckets.mask_flags(mask, params)
            states = _with_worker_axis(collectives.init_states(params, axis_name, options, flags))
        return AllReduceState(step=jnp.asarray(start_step, jnp.int32), method=states)

    def update(
        updates: Any, state: AllReduceState, params: Any = None
    ) -> tuple[Any, AllReduceState]:
        del params
        updates, states = collectives.reduce_tree(
            updates,
            axis_name,
            key=jax.random.fold_in(jax.random.key(seed), state.step),
            options=options,
            compress=buckets.mask_flags(mask, updates),
            mean=True,
            states=_without_worker_axis(state.method) if stateful else None,
        )
        after = _with_worker_axis(states) if stateful else ()
        return updates, AllReduceState(step=state.step + 1, method=after)

    return optax.GradientTransformation(init, update)


def _with_worker_axis(states: tuple[State, ...]) -> tuple[State, ...]:
    return jax.tree.map(lambda leaf: leaf[None], states)


def _without_worker_axis(states: tuple[State, ...]) -> tuple[State, ...]:
    return jax.tree.map(lambda leaf: leaf[0], states)
