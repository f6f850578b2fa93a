"""Driver of all collectives: checks, a plan, a loop over buckets, and the leaves of the result."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import checks
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.leaves import mask_flags, named_leaves, wire_dtype
from dynamiq_jax._buckets.no_gradient import refuse_gradient
from dynamiq_jax._buckets.operations import Operation
from dynamiq_jax._buckets.options import Compression
from dynamiq_jax._buckets.plan import Bucket, Plan, make_plan
from dynamiq_jax._methods.base import Method, State
from pallas_kernels import compat

States = tuple[State, ...]  # of a method, for every bucket


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a collective."""

    tree: Any
    states: States  # for the next step
    metrics: Mapping[str, Array]  # of the method: means over buckets, weighted by coordinates


def run(
    operation: Operation, tree: Any, key: Array, how: Compression, states: States | None = None
) -> Outcome:
    """Run a collective on a tree.

    Args:
      operation: kind of collective, and its axes.
      tree: pytree of arrays.
      key: typed PRNG key, the same on all workers.
      how: method, topology and options.
      states: states of the method for every bucket; None for those of a first step.
    """
    axes = operation.axes
    key = checks.check_key(key, axes.names)
    if operation.salt is not None:
        key = jax.random.fold_in(key, operation.salt)
    named, structure = named_leaves(tree)
    for name, leaf in named:
        operation.check(name, leaf)
    leaves = [leaf for _, leaf in named]
    plan = _plan(operation, leaves, tree, how)
    if states is not None:
        _check_states(states, plan, how.method, axes)

    result = operation.exact({index: leaves[index] for index, _ in plan.exact})
    result |= {index: operation.empty(leaves[index]) for index in plan.untouched}
    next_states: list[State] = [()] * len(plan.buckets)
    totals = dict.fromkeys(how.method.metrics, jnp.float32(0))
    token = None
    numbered = list(enumerate(plan.buckets))
    for number, bucket in reversed(numbered) if operation.last_first else numbered:
        state = _first_state(bucket, how.method, axes) if states is None else states[number]
        flat = operation.flatten(bucket, leaves, how.method.granule)
        flat = after(token, refuse_gradient(flat.astype(wire_dtype(bucket.dtype))))
        sent = operation.send(how.method, bucket, flat, jax.random.fold_in(key, number), state)
        token, next_states[number] = sent.token, sent.state
        result |= operation.unflatten(bucket, sent.values, leaves)
        for name, value in sent.metrics.items():
            totals[name] = totals[name] + value * np.float32(bucket.size)
    size = np.float32(max(1, sum(bucket.size for bucket in plan.buckets)))
    return Outcome(
        tree=jax.tree.unflatten(structure, [result[index] for index in range(len(leaves))]),
        states=tuple(next_states),
        metrics={name: total / size for name, total in totals.items()},
    )


def first_states(operation: Operation, tree: Any, how: Compression) -> States:
    """Return the states of a method for every bucket of a tree, before the first step."""
    plan = _plan(operation, jax.tree.leaves(tree), tree, how)
    return tuple(_first_state(bucket, how.method, operation.axes) for bucket in plan.buckets)


def after(token: Array | None, flat: Array) -> Array:
    """Return the same values, which are not available before `token` is.

    So buckets travel one after the other. Otherwise XLA joins the transfers of several buckets, or
    has them all wait for one, and none is left to run under the backward pass. XLA removes
    `lax.optimization_barrier` before it does so, and cannot tell that this comparison is always
    true.
    """
    if token is None or not compat.varying_axes(token) <= compat.varying_axes(flat):
        return flat
    bits = lax.bitcast_convert_type(token[0].astype(jnp.float32), jnp.uint32)
    return jnp.where((bits & 255) >> 8 == 0, flat, jnp.zeros_like(flat))


def _plan(operation: Operation, leaves: Sequence[Array], tree: Any, how: Compression) -> Plan:
    axes = operation.axes
    # A leaf that is replicated over another axis must not share a bucket, and so the order of its
    # rows, with one that differs along it.
    kinds = [compat.varying_axes(leaf) - set(axes.names) for leaf in leaves]
    planned = [operation.planned(leaf) for leaf in leaves]
    flags = mask_flags(how.options.mask, tree)
    return make_plan(planned, axes, how, compress=flags, kinds=kinds)


def _first_state(bucket: Bucket, method: Method, axes: Axes) -> State:
    """Return a state before the first step, marked like those after it, which differ by worker."""
    return compat.vary_over(method.init_state(bucket.call), axes.names)


def _check_states(states: States, plan: Plan, method: Method, axes: Axes) -> None:
    """Raise ValueError for states that were made for other buckets."""
    wanted = jax.eval_shape(lambda: tuple(_first_state(b, method, axes) for b in plan.buckets))
    shapes = [
        [(jax.tree_util.keystr(path), np.shape(leaf)) for path, leaf in found]
        for found in map(jax.tree_util.tree_leaves_with_path, (states, wanted))
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"state.method has arrays of shapes {shapes[0]}, but these gradients need {shapes[1]}. "
            "It belongs to leaves of other shapes or dtypes, or to another method, mask, "
            "exact_below, bucket_bytes or number of workers. Call init with what update gets."
        )
