"""State of local SGD, and checks that a state belongs to the settings in use."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array
from jax.tree_util import keystr

from dynamiq_jax._plan.state_names import check_names
from dynamiq_jax._states.states import check_has_owner
from dynamiq_jax.methods import State

_ANEW = "or start anew with init(state.reference)"


class LocalSGDState(NamedTuple):
    """State of `LocalSGD`: a plain pytree that can be saved and restored.

    All fields but `method` are the same on all workers. The arrays of `method` have a leading axis
    of size 1, the worker, as in `AllReduceState`. `LocalSGD.state_specs` has the specs of
    `jax.shard_map`.
    """

    step: Array  # int32 scalar: local steps taken
    reference: Any  # parameters after the last outer steps, like those of a worker
    # Keys name the leaves of a fragment, and the slices of leaves that are cut.
    outer: Mapping[str, optax.OptState]  # of each fragment
    # Mean changes that are sent but not applied, of each fragment, under the period and the delay
    # that say when; {} without delay.
    pending: Mapping[str, Mapping[str, Any]]
    # States of the method, of each fragment, as those of `AllReduceState`; {} if it has none. All
    # workers go on from first ones if any gets those of another.
    method: Mapping[str, Mapping[str, State]]


def check_settings(state: LocalSGDState, names: Iterable[str], timing: Iterable[str]) -> None:
    """Raise ValueError for a state of other fragments, or with pending changes of other steps."""
    check_names(
        "state.outer",
        state.outer,
        names,
        user="these parameters and fragments",
        remedy=f"Give the parameters, fragments and specs of init, {_ANEW}.",
    )
    given, wanted = (" and ".join(names) or "no delay" for names in (state.pending, timing))
    if given != wanted:
        raise ValueError(
            f"state.pending is of {given!r}, but this LocalSGD is of {wanted!r}: a change that is "
            "pending would be applied at another step, or never. Go on with every and delay of "
            f"init, {_ANEW}, which drops changes that are pending."
        )


def check_fragment(
    state: LocalSGDState, name: str, first: optax.OptState, states: tuple[str, ...]
) -> None:
    """Raise ValueError unless a fragment has the named states, and outer ones like `first`."""
    leaves = map(jax.tree.leaves_with_path, (state.outer[name], first))
    given, wanted = ({keystr(path): np.shape(leaf) for path, leaf in each} for each in leaves)
    if given != wanted:
        raise ValueError(
            f"state.outer[{name!r}] has {given!r:.200}, but outer needs {wanted!r:.200}. Give the "
            f"outer optimizer of init, whose rates may change, {_ANEW}."
        )
    of_method = state.method.get(name, {})
    check_has_owner(
        of_method,
        states,
        "state._replace(method={name: {**first, **state.method[name]} "
        "for name, first in init(params).method.items()})",
    )
    check_names(
        "state.method",
        of_method,
        states,
        user="the method and options",
        remedy=f"Go on with the method, exact_below, bucket_bytes and specs of init, {_ANEW}.",
    )
