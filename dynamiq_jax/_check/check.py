"""All checks of a call, between its plan and its run."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array

from dynamiq_jax._check import agreement
from dynamiq_jax._collectives.measured import Measured
from dynamiq_jax._inputs import checks
from dynamiq_jax._plan.plan import Plan
from dynamiq_jax._states.states import check_states


def check(
    plan: Plan, leaves: Sequence[Array], key: Any, states: Mapping[str, Any] | None = None
) -> Array:
    """Raise the errors of a call, and return its key as a typed one.

    Raises:
      ValueError: a leaf, a method, an option, a key or a state that does not fit the call.
      TypeError: a key that is not a PRNG key.
      RuntimeError: processes trace calls that differ.
    """
    key = checks.check_key(key, plan.collective.axes.names)
    check_plan(plan)
    for name, leaf in zip(plan.names, leaves, strict=True):
        plan.collective.check_values(name, leaf)
    if states is not None and (states or plan.state_names):
        check_states(plan, states)
    agreement.check(plan, key)
    return key


def check_plan(plan: Plan) -> None:
    """Raise ValueError for a plan that cannot be run, whatever the values are."""
    collective, limit = plan.collective, plan.request.compression.max_error
    for name, leaf, spec in zip(plan.names, plan.leaves, plan.shards.specs, strict=True):
        collective.check(name, leaf, spec)
    for method in plan.used:
        collective.check_method(method)
        plan.request.check_state(method)
    if limit is None:
        return
    if not isinstance(collective, Measured):
        raise ValueError(
            f"max_error={limit!r} limits the error of an all-reduce, and this is half of one. "
            "Leave it out."
        )
    for method in plan.used:
        if method.is_stateful:
            raise ValueError(
                f"max_error={limit!r} has no meaning with method={method!r}, which adds to a sum "
                "what earlier ones left out. Leave it out, or give another method."
            )
