"""One call of a collective: plan, check, run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from dynamiq_jax._check.check import check
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._plan import recording
from dynamiq_jax._plan.plan import Plan, plan_tree
from dynamiq_jax._run.on_devices import Outcome, run_on_devices
from dynamiq_jax._run.sample import SampledKey
from dynamiq_jax._states.states import NamedStates


def run(
    collective: Collective,
    tree: Any,
    key: Any,
    request: Request,
    *,
    states: NamedStates | None = None,
) -> Outcome:
    """Run a collective on a tree.

    Args:
      collective: kind of collective, and its axes.
      tree: pytree of arrays.
      key: PRNG key, the same on all workers, or a `SampledKey`; None: one of the terms alone.
      request: what the call asks for.
      states: states of the methods by their names, as from `first_states`; None for those of a
        first step.
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
    outcome = run_on_devices(plan, leaves, base, states, sampled=sampled)
    sums = recording.mark(number, "sum", jax.tree.leaves(outcome.tree))
    return dataclasses.replace(outcome, tree=jax.tree.unflatten(plan.structure, sums))
