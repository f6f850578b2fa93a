"""State of pipelined steps, and checks that its arrays belong to the parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import optax
from jax import Array

from dynamiq_jax.parts.collectives import Plan, check_names
from dynamiq_research.pipelined import halves

_REMEDY = (
    "To go on with other leaves, workers or options, keep the result of gather, and give it to "
    "resume."
)


class PipelinedState(NamedTuple):
    """State of `Pipelined` between two steps: a plain pytree that can be saved and restored.

    All fields but `shards` and `exact` are the same on all workers. The arrays of these two have a
    leading axis of size 1, the worker, as in `AllReduceState.method`. `Pipelined.state_specs` has
    the specs of `jax.shard_map`.
    """

    step: Array  # int32 scalar: gradients scattered so far
    params: Any  # without the gradients of the last step
    opt_state: optax.OptState  # likewise
    # This worker's part of the mean of each bucket, float32 [1, size]. Keys name the leaves of a
    # bucket, and how it is cut into shards.
    shards: Mapping[str, Array]
    # Gradients of this worker of the leaves that are in no bucket, [1, *shape]: `gather` sums them.
    exact: tuple[Array, ...]
    is_pending: Array  # bool scalar: whether shards and exact leaves are still to be applied


class PipelinedUpdate(NamedTuple):
    """Parameters and optimizer state to which all gradients have been applied."""

    step: Array  # int32 scalar: gradients scattered so far
    params: Any
    opt_state: optax.OptState
    # Norm of the mean gradient that was applied, before clipping; 0 if none was: float32 scalar.
    gradient_norm: Array


class PipelinedReport(NamedTuple):
    """Static cost of one step, for each worker."""

    scattered_bytes: int  # sent over the slow axis under the backward pass
    gathered_bytes: int  # sent over the slow axis under the next forward pass
    exact_bytes: int  # sent for leaves that are in no bucket
    state_bytes: int  # held between steps: shards and exact leaves
    buckets: int  # those beyond options.unrolled_buckets run in a loop, under no computation

    @property
    def bytes_per_worker(self) -> int:
        """All bytes that each worker sends over the slow axis."""
        return self.scattered_bytes + self.gathered_bytes + self.exact_bytes


def shard_names(plan: Plan) -> list[str]:
    """Return the names of the shards of all buckets."""
    workers = plan.collective.axes.slow.size
    return [
        plan.name_of("shard", bucket, workers, halves.shard_size(bucket)) for bucket in plan.buckets
    ]


def check_state(state: PipelinedState, first: PipelinedState) -> None:
    """Raise ValueError for a state whose pending gradients belong to other parameters.

    Args:
      state: the state.
      first: state of the same parameters without pending gradients, or its shapes.
    """
    user = "these parameters and options"
    check_names("state.shards", state.shards, first.shards, user=user, remedy=_REMEDY)
    # Leaves that are in no bucket are then the same too.
    arrays = (leaf for leaf, wanted in _pairs(state, first) if np.shape(leaf) != wanted.shape)
    for leaf in arrays:
        raise ValueError(
            f"state has pending gradients of shape {np.shape(leaf)}, whose first axis is not one "
            "worker. Pass the state through shard_map with in_specs and "
            f"out_specs=pipelined.state_specs. {_REMEDY}"
        )


def _pairs(state: PipelinedState, first: PipelinedState) -> list[tuple[Any, Any]]:
    shards = [(state.shards[name], leaf) for name, leaf in first.shards.items()]
    return shards + list(zip(state.exact, first.exact, strict=True))
