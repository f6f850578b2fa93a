"""Driver of all collectives: from a tree and a user's arguments to leaves on each device, and back.

Shards are found first, then a plan of the buckets of one device. The loop over buckets runs where
all axes that split leaves are manual.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import agreement, checks, exact, recording
from dynamiq_jax._buckets.leaves import named_leaves
from dynamiq_jax._buckets.loop import States, send_all
from dynamiq_jax._buckets.operations import Operation
from dynamiq_jax._buckets.options import Compression
from dynamiq_jax._buckets.plan import Plan, make_plan
from dynamiq_jax._buckets.shards import Shards, find_shards
from dynamiq_jax.methods import Method
from pallas_kernels import compat

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a collective."""

    tree: Any
    states: States  # for the next step
    metrics: Mapping[str, Array]  # of the methods: means over buckets, weighted by coordinates


def run(
    operation: Operation,
    tree: Any,
    key: Array,
    how: Compression,
    *,
    specs: Any = None,
    states: States | None = None,
) -> Outcome:
    """Run a collective on a tree.

    Args:
      operation: kind of collective, and its axes.
      tree: pytree of arrays.
      key: PRNG key, the same on all workers.
      how: policy, topology and options.
      specs: how the leaves are split over axes that are not manual here; see `find_shards`.
      states: states of the methods for every bucket, as from `first_states`; None for those of a
        first step.
    """
    key = checks.check_key(key, operation.axes.names)
    if operation.salt is not None:
        key = jax.random.fold_in(key, operation.salt)
    layout = Layout.of(operation, tree, how, specs)
    plan, shards = layout.plan, layout.shards
    for name, leaf in zip(layout.names, layout.leaves, strict=True):
        operation.check_values(name, leaf)
    if states is not None:
        layout.check_states(states)
    layout.check_agreement(key)

    def local(
        leaves: dict[int, Array], key: Array, states: States | None
    ) -> tuple[dict[int, Array], States, Mapping[str, Array]]:
        before = layout.local_states() if states is None else _without_worker_axis(states)
        result, after_step, metrics = send_all(operation, plan, leaves, key, how, before)
        metrics = {**layout.no_metrics(), **metrics}
        if shards.axes:
            metrics = {name: lax.pmean(value, shards.axes) for name, value in metrics.items()}
        return result, _with_worker_axis(after_step), metrics

    touched = {
        index: leaf for index, leaf in enumerate(layout.leaves) if index not in plan.untouched
    }
    split = {index: shards.specs[index] for index in touched}
    whole = {
        index: operation.result_spec(layout.leaves[index], spec) for index, spec in split.items()
    }
    mapped = shards.map(
        local,
        in_specs=(split, P(), None if states is None else layout.state_specs),
        out_specs=(whole, layout.state_specs, P()),
    )
    result, after_step, metrics = mapped(touched, key, states)
    for index in plan.untouched:
        leaf = layout.leaves[index]
        result[index] = np.zeros(operation.shape(leaf), leaf.dtype)
    return Outcome(
        tree=jax.tree.unflatten(layout.structure, [result[i] for i in range(len(layout.leaves))]),
        states=after_step,
        metrics=metrics,
    )


def first_states(operation: Operation, tree: Any, how: Compression, *, specs: Any = None) -> States:
    """Return the states of a method for every bucket of a tree, before the first step.

    Every array has a leading axis: the devices over which leaves of the bucket are split by axes
    that are not manual here, which is one where there are none.
    """
    return Layout.of(operation, tree, how, specs).first_states()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Leaves of a tree, their shards, and the plan of each device."""

    operation: Operation
    how: Compression
    names: list[str]
    leaves: list[Array]
    structure: Any
    shards: Shards
    split_over: list[tuple[str, ...]]  # further axes along which the values of each leaf differ
    used: tuple[Method, ...]  # methods of compressed leaves, in their order
    plan: Plan

    @staticmethod
    def of(operation: Operation, tree: Any, how: Compression, specs: Any) -> "Layout":
        """Find the shards of a tree, and plan the buckets of each device."""
        named, structure = named_leaves(tree)
        names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
        shards = find_shards(names, leaves, tree, specs)
        own = set(operation.axes.names)
        planned, split_over = [], []
        for index, (name, leaf) in enumerate(named):
            operation.check(name, leaf)
            operation.check_shards(name, leaf, shards.specs[index])
            planned.append(operation.planned(shards.local(index, leaf)))
            varying = compat.varying_axes(leaf) - own
            split_over.append((*sorted(varying), *shards.axes_of(index)))
        methods = how.policy.methods(tree)
        used = how.policy.used(tree)
        for method in used:
            operation.check_method(method)
            how.check_state(method)
        _check_limit(operation, how, used)
        plan = make_plan(
            planned,
            operation.axes,
            how,
            methods,
            split_over=split_over,
            cuts=operation.cuts(how.options),
        )
        if recording.is_recording():
            recording.record(_record(operation, names, planned, plan))
        return Layout(operation, how, names, leaves, structure, shards, split_over, used, plan)

    @property
    def state_specs(self) -> tuple[PartitionSpec, ...]:
        """Specs of the leading axis of the arrays of each bucket's state."""
        axes = [
            tuple(axis for axis in bucket.split_over if axis in self.shards.axes)
            for bucket in self.plan.buckets
        ]
        return tuple(P(names) if names else P() for names in axes)

    def local_states(self) -> States:
        """Return first states of one device, marked like those after the first step."""
        return tuple(
            compat.vary_over(
                bucket.method.init_state(bucket.call),
                (*self.operation.axes.names, *bucket.split_over),
            )
            for bucket in self.plan.buckets
        )

    def no_metrics(self) -> dict[str, Array]:
        """Return zero for the metrics of all methods."""
        return {name: jnp.zeros((), jnp.float32) for name in self.how.metrics(self.used)}

    def first_states(self) -> States:
        """Return first states of all devices; see `first_states`."""
        mapped = self.shards.map(
            lambda: _with_worker_axis(self.local_states()),
            in_specs=(),
            out_specs=self.state_specs,
        )
        return mapped()

    def check_agreement(self, key: Array) -> None:
        """Check that all processes trace the same collective; see `agreement.check`."""
        tree = jax.tree.unflatten(self.structure, self.leaves)
        agreement.check(self.operation, self.how, tree, key, self.shards.specs)

    def check_states(self, states: States) -> None:
        """Raise ValueError for states that were made for other buckets."""
        found, wanted = shapes_of(states), shapes_of(jax.eval_shape(self.first_states))
        if found == wanted:
            return
        if [(path, shape[1:]) for path, shape in found] == [
            (path, shape[1:]) for path, shape in wanted
        ]:
            differing = (a for a, b in zip(found, wanted, strict=True) if a != b)
            path, shape = next(differing)
            raise ValueError(
                f"state.method{path} has shape {shape}, whose first axis is not one worker. Give "
                "shard_map the specs of dq.AllReduceState: "
                f"method=P({_spelled(self.operation.axes.names)})."
            )
        raise ValueError(
            f"state.method has arrays of shapes {found}, but these gradients need {wanted}. It "
            "belongs to leaves of other shapes or dtypes, or to another method, exact_below, "
            "bucket_bytes, specs or number of workers. Call init with gradients like these."
        )


def _record(
    operation: Operation, names: list[str], leaves: list[Any], plan: Plan
) -> recording.Record:
    axes = operation.axes
    return recording.Record(
        axes=axes.names,
        num_workers=axes.slow.size,
        mesh=tuple(jax.sharding.get_abstract_mesh().shape.items()),
        names=tuple(names),
        shapes=tuple(leaf.shape for leaf in leaves),
        dtypes=tuple(str(leaf.dtype) for leaf in leaves),
        plan=plan,
        exact_bytes=tuple(exact.bytes_sent(axes, [leaves[index]]) for index, _ in plan.exact),
    )


def _check_limit(operation: Operation, how: Compression, used: tuple[Method, ...]) -> None:
    """Raise ValueError for a limit of the error that a collective or a method cannot keep."""
    limit = how.options.max_error
    if limit is None:
        return
    if not operation.can_estimate:
        raise ValueError(
            f"max_error={limit!r} limits the error of an all-reduce, and this is half of one. Give "
            "dq.Options() without it."
        )
    for method in used:
        if method.is_stateful:
            raise ValueError(
                f"max_error={limit!r} has no meaning with method={method!r}, which adds to a sum "
                "what earlier ones left out. Give dq.Options() without it, or another method."
            )


def _with_worker_axis(states: States) -> States:
    return jax.tree.map(lambda leaf: leaf[None], states)


def _without_worker_axis(states: States) -> States:
    return jax.tree.map(lambda leaf: leaf[0], states)


def shapes_of(states: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return paths and shapes of all arrays of states."""
    return [
        (jax.tree_util.keystr(path), np.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(states)
    ]


def _spelled(names: tuple[str, ...]) -> str:
    return repr(names if len(names) > 1 else names[0])
