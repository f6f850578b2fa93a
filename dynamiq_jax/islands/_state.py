"""State of an island, and what leaves and enters a process in a round."""

from typing import Any, Literal, NamedTuple

import numpy as np
import optax

from dynamiq_jax.islands._packing import Packed
from dynamiq_jax.islands._records import Decision
from dynamiq_jax.islands._shards import Values
from dynamiq_jax.islands.merging import hash_of


class IslandState(NamedTuple):
    """State of an island: a plain pytree, with the shardings of the parameters.

    `round`, `reference` and `outer` are the same on all islands.
    """

    round: int  # outer steps taken
    reference: Any  # parameters after the last outer step: the model to evaluate and to keep
    outer: optax.OptState
    residual: Any  # what the others have not received of this island, like `reference`
    # Where local steps began that ran beside an exchange; None for those that begin at `reference`.
    start: Any = None


class Outgoing(NamedTuple):
    """Change of a round that an island sends."""

    state: IslandState  # at the begin of the round
    reference: str  # hash of the state
    start: Any  # where the local steps began
    wanted: Any  # what is to be sent: the change and the residual
    packed: Packed
    loss: float | None


class Transferred(NamedTuple):
    """End of the transfers of a round, in the memory of the host."""

    decision: Decision
    mean: Values | None  # the mean change; None if no change counts
    fate: Literal["counts", "late", "left out"]  # of the change of this island
    applied: Values  # what counts of it, for `feedback`


def hash_of_state(state: IslandState) -> str:
    """Return a hash of everything that is the same on all islands."""
    # int32 has the same bits with and without `jax_enable_x64`.
    return hash_of((np.int32(state.round), state.reference, state.outer))
