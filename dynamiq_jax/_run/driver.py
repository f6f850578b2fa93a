"""One call of a collective: plan, check, and run on the shards of each device."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.order import token_of
from dynamiq_jax._check.check import check
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._inputs.request import RESET_STATES, Request
from dynamiq_jax._plan import recording
from dynamiq_jax._plan.plan import Plan, plan_tree
from dynamiq_jax._run.loop import send_all
from dynamiq_jax._run.sample import SampledKey
from dynamiq_jax._states.states import NamedStates, by_name, specs_of, to_go_on_with
from pallas_kernels._jax import compat


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a collective."""

    tree: Any
    states: NamedStates  # for the next step
    metrics: Mapping[str, Array]  # of the methods: means over buckets, weighted by coordinates
    foreign: Array | None  # share of workers with states of others; None without states


def run(
    collective: Collective,
    tree: Any,
    key: Any,
    request: Request,
    *,
    states: NamedStates | None = None,
) -> Outcome:
    """Run a collective on a tree.

    The key is the same on all workers, or a `SampledKey`; None is one of the terms alone. Without
    states, which are by their names, it is a first step.
    """
    plan, leaves = plan_tree(collective, tree, request)
    return run_plan(plan, leaves, key, states)


def run_plan(
    plan: Plan, leaves: Sequence[Array], key: Any, states: NamedStates | None = None
) -> Outcome:
    """Check a plan and run it on its leaves; see `run`."""
    number = recording.record(plan)
    leaves = recording.mark(number, "terms", leaves)
    key = SampledKey(jax.random.key(0)) if key is None else key
    sampled = isinstance(key, SampledKey)
    base = check(plan, leaves, key.base if sampled else key, states)
    outcome = _run_on_devices(plan, leaves, base, states, sampled=sampled)
    sums = recording.mark(number, "sum", jax.tree.leaves(outcome.tree))
    return dataclasses.replace(outcome, tree=jax.tree.unflatten(plan.structure, sums))


def _run_on_devices(
    plan: Plan, leaves: Sequence[Array], key: Array, states: NamedStates | None, *, sampled: bool
) -> Outcome:
    """Run a plan where all axes that split leaves are manual.

    If `sampled`, samples of the leaves of all workers are folded into the keys of buckets.
    """
    collective, shards = plan.collective, plan.shards
    if collective.salt is not None:
        key = jax.random.fold_in(key, collective.salt)

    def local(
        leaves: dict[int, Array], key: Array, states: NamedStates | None, token: Array | None
    ) -> tuple[dict[int, Array], NamedStates, Mapping[str, Array], Array | None, Array | None]:
        sampled_over = None
        if sampled:
            varying = frozenset[str]().union(*map(compat.varying_axes, leaves.values()))
            own = (*collective.axes.names, *shards.axes)
            sampled_over = (*own, *sorted(varying - {*own}))
        before: tuple[Any, ...] = ((),) * len(plan.buckets)
        foreign = None
        if plan.state_names:
            before, foreign, token = to_go_on_with(plan, states, token)
        result, after_step, metrics, token = send_all(
            plan, leaves, key, before, token, sampled_over
        )
        named = by_name(plan, after_step) if plan.state_names else {}
        zeros = {name: jnp.zeros((), jnp.float32) for name in plan.metrics}
        metrics = {**zeros, **metrics}
        if foreign is not None:
            metrics |= {RESET_STATES: foreign}
        # Those of a method are of the parts of this device, also over axes that were manual before.
        others = frozenset[str]().union(*map(compat.varying_axes, metrics.values()))
        if axes := (*shards.axes, *sorted(others - {*shards.axes})):
            metrics = {name: lax.pmean(value, axes) for name, value in metrics.items()}
            token = token_of([token, *metrics.values()])
        return result, named, metrics, shards.same(foreign), shards.same(token)

    split = {index: shards.specs[index] for index in plan.touched}
    whole = {index: collective.result_spec(leaves[index], spec) for index, spec in split.items()}
    specs = specs_of(plan) if plan.state_names else {}
    mapped = shards.map(
        local,
        in_specs=(split, P(), None if states is None else specs, P()),
        out_specs=(whole, specs, P(), P(), P()),
    )
    touched = {index: leaves[index] for index in plan.touched}
    result, after_step, metrics, foreign, token = mapped(touched, key, states, order.last_token())
    order.remember(token)
    for index in plan.untouched:
        result[index] = np.zeros(collective.shape(leaves[index]), leaves[index].dtype)
    tree = jax.tree.unflatten(plan.structure, [result[i] for i in range(len(leaves))])
    return Outcome(tree, after_step, metrics, foreign)
