"""The run of a plan on all devices: from whole leaves to the shards of each device, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.order import token_of
from dynamiq_jax._plan.plan import Plan
from dynamiq_jax._run.loop import send_all
from dynamiq_jax._states.states import NamedStates, by_name, specs_of, to_go_on_with
from pallas_kernels._jax import compat

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a collective."""

    tree: Any
    states: NamedStates  # for the next step
    metrics: Mapping[str, Array]  # of the methods: means over buckets, weighted by coordinates


def run_on_devices(
    plan: Plan,
    leaves: Sequence[Array],
    key: Array,
    states: NamedStates | None,
    *,
    sampled: bool,
) -> Outcome:
    """Run a plan where all axes that split leaves are manual.

    Args:
      plan: the plan.
      leaves: leaves of the tree.
      key: typed PRNG key, the same on all workers.
      states: states of the methods by their names; None for those of a first step.
      sampled: whether samples of the leaves of all workers are folded into the keys of buckets.
    """
    collective, shards = plan.collective, plan.shards
    if collective.salt is not None:
        key = jax.random.fold_in(key, collective.salt)

    def local(
        leaves: dict[int, Array], key: Array, states: NamedStates | None, token: Array | None
    ) -> tuple[dict[int, Array], NamedStates, Mapping[str, Array], Array | None]:
        sampled_over = None
        if sampled:
            varying = frozenset[str]().union(*map(compat.varying_axes, leaves.values()))
            own = (*collective.axes.names, *shards.axes)
            sampled_over = (*own, *sorted(varying - {*own}))
        before: tuple[Any, ...] = ((),) * len(plan.buckets)
        of_states: dict[str, Array] = {}
        if plan.state_names:
            before, of_states, token = to_go_on_with(plan, states, token)
        result, after_step, metrics, token = send_all(
            plan, leaves, key, before, token, sampled_over
        )
        named = by_name(plan, after_step) if plan.state_names else {}
        if plan.metrics:
            zeros = {name: jnp.zeros((), jnp.float32) for name in plan.metrics}
            metrics = {**zeros, **metrics, **of_states}
        # Those of a method are of the parts of this device, also over axes that were manual before.
        others = frozenset[str]().union(*map(compat.varying_axes, metrics.values()))
        if axes := (*shards.axes, *sorted(others - {*shards.axes})):
            metrics = {name: lax.pmean(value, axes) for name, value in metrics.items()}
            token = token_of([token, *metrics.values()])
        return result, named, metrics, shards.same(token)

    split = {index: shards.specs[index] for index in plan.touched}
    whole = {index: collective.result_spec(leaves[index], spec) for index, spec in split.items()}
    specs = specs_of(plan) if plan.state_names else {}
    mapped = shards.map(
        local,
        in_specs=(split, P(), None if states is None else specs, P()),
        out_specs=(whole, specs, P(), P()),
    )
    touched = {index: leaves[index] for index in plan.touched}
    result, after_step, metrics, token = mapped(touched, key, states, order.last_token())
    order.remember(token)
    for index in plan.untouched:
        result[index] = np.zeros(collective.shape(leaves[index]), leaves[index].dtype)
    tree = jax.tree.unflatten(plan.structure, [result[i] for i in range(len(leaves))])
    return Outcome(tree, after_step, metrics)
