"""The worker that states belong to: a record beside them, which is compared in every step.

Where types do not record the axes over which values vary, `out_specs=P()` passes each worker its
own states, but a checkpoint holds those of one worker for all. Only a comparison at run time
notices.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import exact, scopes
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.order import after, token_of
from dynamiq_jax._inputs.request import RESET_STATES

Tree = TypeVar("Tree")

OWNER = "worker"  # name of the record, among those of states


def owner(axes: Axes) -> Array:
    """Return the record of this worker, int32 [2]: its index, and the number of workers."""
    index = lax.axis_index(axes.names)
    return jnp.stack([index, jnp.full_like(index, axes.num_workers)])


def reset_foreign(
    record: Array, states: Tree, first: Tree, axes: Axes, token: Array | None
) -> tuple[Tree, dict[str, Array], Array | None]:
    """Return the states to go on with: first ones on all workers if any has those of another.

    All of them start anew together: parts of some states are the same on all workers, or add up to
    others. The decision depends on the record alone, so it can be sent while gradients are
    computed.

    Args:
      record: of the worker that the states belong to, from `owner` in an earlier step.
      states: states of this worker, of all buckets.
      first: those before the first step.
      axes: the workers.
      token: token that the comparison waits for; see `order.after`.

    Returns:
      States like the first ones, metrics, and a token that is available after the comparison.
    """
    with scopes.scope(scopes.STATES):
        is_foreign = jnp.any(record != owner(axes))
        count = lax.psum(after(token, is_foreign.astype(jnp.int32)), axes.names)
    kept = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), first, states)
    share = count.astype(jnp.float32) / np.float32(axes.num_workers)
    return kept, {RESET_STATES: share}, token_of([count])


def bytes_sent(axes: Axes) -> int:
    """Count the bytes that each worker sends in `reset_foreign`."""
    return exact.bytes_sent(axes, [jax.ShapeDtypeStruct((), jnp.int32)])
