"""Driver of all collectives: checks, a plan, a loop over buckets, and the leaves of the result."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import checks
from dynamiq_jax._buckets.leaves import join, mask_flags, named_leaves, split
from dynamiq_jax._buckets.no_gradient import refuse_gradient
from dynamiq_jax._buckets.operations import Operation
from dynamiq_jax._buckets.options import Compression
from dynamiq_jax._buckets.plan import Plan, make_plan
from dynamiq_jax.methods import State
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
    operation.check_method(how.method)
    key = checks.check_key(key, operation.axes.names)
    if operation.salt is not None:
        key = jax.random.fold_in(key, operation.salt)
    named, structure = named_leaves(tree)
    for name, leaf in named:
        operation.check(name, leaf)
    leaves = [leaf for _, leaf in named]
    plan = _plan(operation, leaves, tree, how)
    if states is None:
        states = _first_states(operation, plan, how)
    else:
        _check_states(states, operation, plan, how)

    result = operation.exact({index: leaves[index] for index, _ in plan.exact})
    for index in plan.untouched:
        result[index] = np.zeros(operation.shape(leaves[index]), leaves[index].dtype)
    after_step, totals = list(states), dict.fromkeys(how.method.metrics, jnp.float32(0))
    token, numbers = None, range(len(plan.buckets))
    for number in reversed(numbers) if operation.last_first else numbers:
        bucket = plan.buckets[number]
        members = [leaves[index] for index in bucket.leaves]
        multiple = operation.multiple(bucket, how.method.granule)
        flat = refuse_gradient(join([operation.rows(leaf) for leaf in members], multiple))
        bucket_key = jax.random.fold_in(key, number)
        sent = operation.send(how.method, bucket, after(token, flat), bucket_key, states[number])
        token, after_step[number] = sent.token, sent.state
        shapes = [operation.shape(leaf) for leaf in members]
        num_rows = operation.result_rows
        pieces = split(sent.total, [math.prod(shape) // num_rows for shape in shapes], num_rows)
        for index, leaf, piece in zip(bucket.leaves, members, pieces, strict=True):
            result[index] = operation.restore(piece, leaf).astype(leaf.dtype)
        for name, value in sent.metrics.items():
            totals[name] = totals[name] + value * np.float32(bucket.size)
    size = np.float32(max(1, sum(bucket.size for bucket in plan.buckets)))
    return Outcome(
        tree=jax.tree.unflatten(structure, [result[index] for index in range(len(leaves))]),
        states=tuple(after_step),
        metrics={name: total / size for name, total in totals.items()},
    )


def first_states(operation: Operation, tree: Any, how: Compression) -> States:
    """Return the states of a method for every bucket of a tree, before the first step."""
    leaves = [leaf for _, leaf in named_leaves(tree)[0]]
    return _first_states(operation, _plan(operation, leaves, tree, how), how)


def after(token: Array | None, flat: Array) -> Array:
    """Delay `flat` until `token` is available.

    So buckets are sent one after the other. Otherwise XLA joins the transfers of several buckets,
    or has them all wait for one, and none is left to run under the backward pass. XLA removes
    `lax.optimization_barrier` before it does so, and does not find that this comparison is always
    true.
    """
    if token is None or not compat.varying_axes(token) <= compat.varying_axes(flat):
        return flat
    bits = lax.bitcast_convert_type(token[0].astype(jnp.float32), jnp.uint32)
    return jnp.where((bits & 255) >> 8 == 0, flat, jnp.zeros_like(flat))


def _plan(operation: Operation, leaves: Sequence[Array], tree: Any, how: Compression) -> Plan:
    # A leaf that is replicated over another axis must not share a bucket, and so the order of its
    # rows, with one that differs along it.
    own = set(operation.axes.names)
    kinds = [compat.varying_axes(leaf) - own for leaf in leaves]
    flags = mask_flags(how.options.mask, tree)
    planned = [operation.planned(leaf) for leaf in leaves]
    return make_plan(planned, operation.axes, how, compress=flags, kinds=kinds)


def _first_states(operation: Operation, plan: Plan, how: Compression) -> States:
    """Return states marked like those after the first step, which differ between workers."""
    states = tuple(how.method.init_state(bucket.call) for bucket in plan.buckets)
    return compat.vary_over(states, operation.axes.names)


def _check_states(states: States, operation: Operation, plan: Plan, how: Compression) -> None:
    """Raise ValueError for states that were made for other buckets."""
    wanted = jax.eval_shape(lambda: _first_states(operation, plan, how))
    shapes = [
        [(jax.tree_util.keystr(path), np.shape(leaf)) for path, leaf in found]
        for found in map(jax.tree_util.tree_leaves_with_path, (states, wanted))
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"state.method has arrays of shapes {shapes[0]}, but these gradients need {shapes[1]}. "
            "It belongs to leaves of other shapes or dtypes, or to another method, mask, "
            "exact_below, bucket_bytes or number of workers. Call init with gradients like these."
        )
