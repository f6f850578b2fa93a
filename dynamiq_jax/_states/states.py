"""States of methods in a call: their names, their specs, and those of the first step.

Beside them is a record of the worker that they belong to, which is compared in every step. Where
types do not record the axes over which values vary, `out_specs=P()` passes each worker its own
states, but a checkpoint holds those of one worker for all. Only a comparison at run time notices.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax._buckets import scopes
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.order import after, token_of
from dynamiq_jax._plan.plan import Plan
from dynamiq_jax._plan.state_names import check_names
from dynamiq_jax.methods import State
from pallas_kernels._jax import compat

OWNER = "worker"  # name of the record, among those of states
_ANEW = (
    "With another number of workers than before, begin with new states: "
    "init(params)._replace(step=state.step), or init(state.reference) of LocalSGD."
)
States = tuple[State, ...]  # of the method, for every bucket; () for one without state
# States by their names, see `state_names`, and the record of `owner`. Every array has a
# leading axis: the devices over which leaves of the bucket are split by axes that are not manual
# here, which is one where there are none.
NamedStates = Mapping[str, State]


def all_names(plan: Plan) -> tuple[str, ...]:
    """Return the names of all states, and of the record of their worker, if there is a state."""
    names = tuple(plan.state_names.values())
    return (*names, OWNER) if names else ()


def specs_of(plan: Plan) -> dict[str, P]:
    """Return the specs of the leading axis of the arrays of each state, and of the record."""
    specs = plan.bucket_specs
    of_states = {name: specs[number] for number, name in plan.state_names.items()}
    return of_states | ({OWNER: P()} if of_states else {})


def first_states(plan: Plan) -> NamedStates:
    """Return the states before the first step, of all devices."""
    mapped = plan.shards.map(
        lambda: by_name(plan, of_first_step(plan)), in_specs=(), out_specs=specs_of(plan)
    )
    return mapped()


def of_first_step(plan: Plan) -> States:
    """Return first states of one device, marked like those after the first step."""
    return tuple(
        compat.vary_over(
            bucket.method.init_state(bucket.call), (*plan.collective.axes.names, *bucket.split_over)
        )
        for bucket in plan.buckets
    )


def by_name(plan: Plan, states: States) -> NamedStates:
    """Return states of one device by their names, with a leading axis."""
    named = {name: states[number] for number, name in plan.state_names.items()}
    if named:
        named[OWNER] = owner(plan.collective.axes)
    return jax.tree.map(lambda leaf: leaf[None], named)


def to_go_on_with(
    plan: Plan, states: NamedStates | None, token: Array | None
) -> tuple[States, Array | None, Array | None]:
    """Return the states of one device for a step, without named ones those of a first step.

    If any worker has states of another, all workers start anew together: parts of some states are
    the same on all workers, or add up to others. The decision depends on the record alone, so it
    can be sent while gradients are computed.

    Returns:
      States by bucket, the share of workers with states of others, and a token that is available
      after the comparison.
    """
    first, names, axes = of_first_step(plan), plan.state_names, plan.collective.axes
    if not states:
        return first, None, token
    local = jax.tree.map(lambda leaf: leaf[0], dict(states))
    own = tuple(local[names[n]] if n in names else () for n in range(len(plan.buckets)))
    with scopes.scope(scopes.STATES):
        is_foreign = jnp.any(local[OWNER] != owner(axes))
        count = lax.psum(after(token, is_foreign.astype(jnp.int32)), axes.names)
    kept = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), first, own)
    share = count.astype(jnp.float32) / np.float32(axes.num_workers)
    return kept, share, token_of([count])


def check_states(plan: Plan, states: NamedStates) -> None:
    """Raise ValueError for states of other buckets, or of several workers at once."""
    check_state_names(states, all_names(plan))
    if not states:
        return
    wanted = jax.eval_shape(lambda: first_states(plan))
    types, wanted_types = (str(jax.tree.structure(dict(each))) for each in (states, wanted))
    if types != wanted_types:
        raise ValueError(
            f"state.method is {types:.300}, not {wanted_types:.300}. Give the types that init "
            "returns: restore a checkpoint into a state like those."
        )
    given = jax.tree.leaves_with_path(dict(states))
    for (path, leaf), needed in zip(given, jax.tree.leaves(wanted), strict=True):
        if np.shape(leaf) != needed.shape:
            names = plan.collective.axes.names
            raise ValueError(
                f"state.method{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, not "
                f"{needed.shape}: its first axis is not one worker. Give shard_map the specs of "
                "the state: dq.AllReduceState with "
                f"method=P({names if len(names) > 1 else names[0]!r}), or LocalSGD's state_specs. "
                f"{_ANEW}"
            )


def check_type(state: Any, kind: type) -> None:
    """Raise TypeError for a state of another type, such as one of a checkpoint without types."""
    if not isinstance(state, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"state is a {type(state).__name__}, not {article} {kind.__name__}. Give the result of "
            "init or of the update before."
        )


def check_state_names(states: Any, wanted: Iterable[str]) -> None:
    """Raise an error for states of methods that have other names than the wanted ones."""
    wanted = tuple(wanted)
    check_has_owner(
        states, wanted, "state._replace(method={**init(params).method, **state.method})"
    )
    check_names(
        "state.method",
        states,
        wanted,
        user="these gradients",
        remedy="Call init with gradients like these, or go on with the leaves, method, "
        "exact_below, bucket_bytes and specs that the state was made with."
        + ("" if wanted else f" {_ANEW}"),  # a worker that is alone needs none
    )


def check_has_owner(states: Any, wanted: Iterable[str], with_owner: str) -> None:
    """Raise ValueError for states that lack only the record of their worker.

    `with_owner` is the expression of a user for the same states with the record.
    """
    if isinstance(states, Mapping) and {*wanted} - {*states} == {OWNER}:
        raise ValueError(
            f"state.method has no {OWNER!r}, which records the worker that states belong to: "
            "dynamiq-jax 0.1.0 wrote none. If each worker has its own states, give "
            f"{with_owner}, or else init(params)."
        )


def owner(axes: Axes) -> Array:
    """Return the record of this worker, int32 [2]: its index, and the number of workers."""
    index = lax.axis_index(axes.names)
    return jnp.stack([index, jnp.full_like(index, axes.num_workers)])
