"""Driver of all collectives: from a tree and a user's arguments to leaves on each device, and back.

Shards are found first, then a plan of the buckets of one device. The loop over buckets runs where
all axes that split leaves are manual.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import agreement, exact, order, recording
from dynamiq_jax._buckets.leaves import named_leaves
from dynamiq_jax._buckets.loop import Sender, States, send_all
from dynamiq_jax._buckets.operations import Operation
from dynamiq_jax._buckets.order import token_of
from dynamiq_jax._buckets.plan import Bucket, Plan, make_plan
from dynamiq_jax._buckets.state_names import check_names, state_name
from dynamiq_jax._buckets.state_owner import OWNER, owner, reset_foreign
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax._inputs.shards import Shards, find_shards
from dynamiq_jax.methods import Method, State
from pallas_kernels import compat

P = PartitionSpec
# Of the buckets whose method carries one, see `state_names`, and the record of `state_owner`.
NamedStates = Mapping[str, State]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a collective."""

    tree: Any
    states: NamedStates  # for the next step
    metrics: Mapping[str, Array]  # of the methods: means over buckets, weighted by coordinates


def run(
    operation: Operation,
    tree: Any,
    key: Array,
    compression: Compression,
    *,
    specs: Any = None,
    states: NamedStates | None = None,
) -> Outcome:
    """Run a collective on a tree.

    Args:
      operation: kind of collective, and its axes.
      tree: pytree of arrays.
      key: PRNG key, the same on all workers.
      compression: policy, topology and options.
      specs: how the leaves are split over axes that are not manual here; see `find_shards`.
      states: states of the methods by their names, as from `first_states`; None for those of a
        first step.
    """
    key = checks.check_key(key, operation.axes.names)
    if operation.salt is not None:
        key = jax.random.fold_in(key, operation.salt)
    planned_tree = PlannedTree.of(operation, tree, compression, specs)
    plan, shards = planned_tree.plan, planned_tree.shards
    for name, leaf in zip(planned_tree.names, planned_tree.leaves, strict=True):
        operation.check_values(name, leaf)
    if states is not None:
        planned_tree.check_states(states)
    planned_tree.check_agreement(key)

    def local(
        leaves: dict[int, Array], key: Array, states: NamedStates | None, token: Array | None
    ) -> tuple[dict[int, Array], NamedStates, Mapping[str, Array], Array | None]:
        before, of_states = planned_tree.local_states(), dict[str, Array]()
        if states and planned_tree.state_names:
            own = planned_tree.of_buckets(states)
            before, of_states, token = reset_foreign(
                states[OWNER][0], own, before, operation.axes, token
            )
        sender = Sender(operation, plan, leaves, key, compression)
        result, after_step, metrics, token = send_all(sender, before, token)
        metrics = {**planned_tree.no_metrics(), **metrics, **of_states}
        if shards.axes:
            metrics = {name: lax.pmean(value, shards.axes) for name, value in metrics.items()}
            token = token_of([token, *metrics.values()])
        return result, planned_tree.named(after_step), metrics, shards.same(token)

    touched = {
        index: leaf for index, leaf in enumerate(planned_tree.leaves) if index not in plan.untouched
    }
    split = {index: shards.specs[index] for index in touched}
    whole = {
        index: operation.result_spec(planned_tree.leaves[index], spec)
        for index, spec in split.items()
    }
    mapped = shards.map(
        local,
        in_specs=(split, P(), None if states is None else planned_tree.state_specs, P()),
        out_specs=(whole, planned_tree.state_specs, P(), P()),
    )
    result, after_step, metrics, token = mapped(touched, key, states, order.last_token())
    order.remember(token)
    for index in plan.untouched:
        leaf = planned_tree.leaves[index]
        result[index] = np.zeros(operation.shape(leaf), leaf.dtype)
    return Outcome(
        tree=jax.tree.unflatten(
            planned_tree.structure, [result[i] for i in range(len(planned_tree.leaves))]
        ),
        states=after_step,
        metrics=metrics,
    )


def first_states(
    operation: Operation, tree: Any, compression: Compression, *, specs: Any = None
) -> NamedStates:
    """Return the states of methods by their names, before the first step.

    Every array has a leading axis: the devices over which leaves of the bucket are split by axes
    that are not manual here, which is one where there are none.
    """
    return PlannedTree.of(operation, tree, compression, specs).first_states()


def names_of_states(
    operation: Operation, tree: Any, compression: Compression, *, specs: Any = None
) -> tuple[str, ...]:
    """Return the names of the states of a tree, as of `first_states`."""
    with recording.paused():  # nothing is sent
        return PlannedTree.of(operation, tree, compression, specs).names_of_states


@dataclasses.dataclass(frozen=True)
class PlannedTree:
    """Leaves of a tree, their shards, and the plan of each device."""

    operation: Operation
    compression: Compression
    names: list[str]
    leaves: list[Array]
    structure: Any
    shards: Shards
    split_over: list[tuple[str, ...]]  # further axes along which the values of each leaf differ
    used: tuple[Method, ...]  # methods of compressed leaves, in their order
    plan: Plan

    @staticmethod
    def of(operation: Operation, tree: Any, compression: Compression, specs: Any) -> "PlannedTree":
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
        methods = compression.policy.methods(tree)
        used = compression.policy.used(tree)
        for method in used:
            operation.check_method(method)
            compression.check_state(method)
        _check_limit(operation, compression, used)
        plan = make_plan(
            planned,
            operation.axes,
            compression,
            methods,
            split_over=split_over,
            cuts=dataclasses.replace(
                operation.cuts(compression.options), names=tuple(f"tree{name}" for name in names)
            ),
        )
        if recording.is_recording():
            recording.record(_record(operation, names, planned, plan))
        return PlannedTree(
            operation, compression, names, leaves, structure, shards, split_over, used, plan
        )

    def name_of(self, kind: str, bucket: Bucket, *facts: Any) -> str:
        """Return the name of something that belongs to the leaves of a bucket.

        Dtypes are no part of it: a residual of parameters in float32 is one of gradients in
        bfloat16 too. With fast axes, it belongs to a worker's part of a bucket.
        """
        leaves = [self.names[index] for index in bucket.leaves]
        if bucket.part is not None:
            leaves = [f"{leaves[0]}[{bucket.part[0]}:{bucket.part[1]}]"]
        if bucket.stripe is not None:
            leaves = [f"stripe {bucket.stripe.number} of {bucket.stripe.count}", *leaves]
        members = [
            [list(self.leaves[index].shape), self.shards.split_of(index)] for index in bucket.leaves
        ]
        fast = [[axis.name, axis.size] for axis in self.operation.axes.fast]
        return state_name(kind, leaves, members, bucket.part, bucket.size, fast, *facts)

    @functools.cached_property
    def state_names(self) -> dict[int, str]:
        """Names of states by the numbers of their buckets, of those whose method carries one.

        They are for methods of the same kind, for the same leaves, and of the same shapes.
        """
        names = {}
        for number, bucket in enumerate(self.plan.buckets):
            if bucket.method.is_stateful:
                first = jax.eval_shape(functools.partial(bucket.method.init_state, bucket.call))
                shapes = [[str(leaf.dtype), list(leaf.shape)] for leaf in jax.tree.leaves(first)]
                names[number] = self.name_of(bucket.method.state_kind, bucket, shapes)
        return names

    @property
    def names_of_states(self) -> tuple[str, ...]:
        """Names of the states of all buckets, and of the record of their worker, if any has one."""
        names = tuple(self.state_names.values())
        return (*names, OWNER) if names else ()

    @property
    def bucket_specs(self) -> tuple[PartitionSpec, ...]:
        """Specs of the leading axis of what devices hold of each bucket."""
        axes = [
            tuple(axis for axis in bucket.split_over if axis in self.shards.axes)
            for bucket in self.plan.buckets
        ]
        return tuple(P(names) if names else P() for names in axes)

    @property
    def state_specs(self) -> dict[str, PartitionSpec]:
        """Specs of the leading axis of the arrays of each state, and of the record."""
        specs = self.bucket_specs
        of_states = {name: specs[number] for number, name in self.state_names.items()}
        return of_states | ({OWNER: P()} if of_states else {})

    def named(self, states: States) -> NamedStates:
        """Return states of all buckets of one device by their names, with a leading axis."""
        named = {name: states[number] for number, name in self.state_names.items()}
        if named:
            named[OWNER] = owner(self.operation.axes)
        return jax.tree.map(lambda leaf: leaf[None], named)

    def of_buckets(self, states: NamedStates) -> States:
        """Invert `named`."""
        local = jax.tree.map(lambda leaf: leaf[0], dict(states))
        names = self.state_names
        return tuple(
            local[names[number]] if number in names else ()
            for number in range(len(self.plan.buckets))
        )

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
        return {name: jnp.zeros((), jnp.float32) for name in self.compression.metrics(self.used)}

    def first_states(self) -> NamedStates:
        """Return first states of all devices; see `first_states`."""
        mapped = self.shards.map(
            lambda: self.named(self.local_states()),
            in_specs=(),
            out_specs=self.state_specs,
        )
        return mapped()

    def check_agreement(self, key: Array) -> None:
        """Check that all processes trace the same collective; see `agreement.check`."""
        tree = jax.tree.unflatten(self.structure, self.leaves)
        agreement.check(self.operation, self.compression, tree, key, self.shards.specs)

    def check_states(self, states: NamedStates) -> None:
        """Raise ValueError for states of other buckets, or of several workers at once."""
        check_state_names(states, self.names_of_states)
        given, wanted = shapes_of(dict(states)), shapes_of(jax.eval_shape(self.first_states))
        for (path, shape), (_, needed) in zip(given, wanted, strict=True):
            if shape != needed:
                raise ValueError(
                    f"state.method{path} has shape {shape}, not {needed}: its first axis is not "
                    "one worker. Give shard_map the specs of dq.AllReduceState: "
                    f"method=P({_spelled(self.operation.axes.names)})."
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


def _check_limit(operation: Operation, compression: Compression, used: tuple[Method, ...]) -> None:
    """Raise ValueError for a limit of the error that a collective or a method cannot keep."""
    limit = compression.options.max_error
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


def check_state_names(states: Any, wanted: Iterable[str]) -> None:
    """Raise an error for states of methods that are not those of some names."""
    wanted = tuple(wanted)
    if isinstance(states, Mapping) and {*wanted} - {*states} == {OWNER}:
        raise ValueError(
            f"state.method has no {OWNER!r}, which records the worker that states belong to: it is "
            "from before states had one. If each worker has its own states, give "
            "state._replace(method={**init(params).method, **state.method}), or else init(params)."
        )
    check_names(
        "state.method",
        states,
        wanted,
        user="these gradients",
        remedy="Call init with gradients like these, or go on with the leaves, method, "
        "exact_below, bucket_bytes and specs that the state was made with.",
    )


def shapes_of(states: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return paths and shapes of all arrays of states."""
    return [
        (jax.tree_util.keystr(path), np.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(states)
    ]


def _spelled(names: tuple[str, ...]) -> str:
    return repr(names if len(names) > 1 else names[0])
