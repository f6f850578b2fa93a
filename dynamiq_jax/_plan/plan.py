"""Plan of a call: everything about it that is static."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets.buckets import Bucket, sort_leaves
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._collectives.measured import measured
from dynamiq_jax._inputs.checks import named_leaves
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._inputs.shards import Shards, find_shards
from dynamiq_jax._plan.state_names import state_name
from dynamiq_jax.methods import Method
from pallas_kernels._jax import compat


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a call that shapes, dtypes and arguments decide.

    It holds no array. The run takes it along with the leaves, the key and the states.
    """

    collective: Collective
    request: Request
    structure: Any  # of the tree
    names: tuple[str, ...]  # paths of the leaves, as in errors
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # whole along the axes of `shards`
    shards: Shards
    parts: tuple[jax.ShapeDtypeStruct, ...]  # of one device, as the collective counts them
    split_over: tuple[tuple[str, ...], ...]  # further axes along which values of each leaf differ
    methods: tuple[Method | None, ...]  # of each leaf by the policy; None for uncompressed ones
    buckets: tuple[Bucket, ...]
    exact: tuple[tuple[int, str], ...]  # (leaf index, why)
    untouched: tuple[int, ...]  # leaves of dtype float0, which hold nothing

    @property
    def used(self) -> tuple[Method, ...]:
        """Methods of compressed leaves, each once."""
        return tuple(dict.fromkeys(method for method in self.methods if method is not None))

    @property
    def touched(self) -> tuple[int, ...]:
        """Indices of the leaves that hold something."""
        return tuple(i for i in range(len(self.leaves)) if i not in self.untouched)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return self.request.metrics(self.used)

    @property
    def bucket_specs(self) -> tuple[PartitionSpec, ...]:
        """Specs of the leading axis of the arrays that devices hold of each bucket."""
        axes = [
            tuple(axis for axis in bucket.split_over if axis in self.shards.axes)
            for bucket in self.buckets
        ]
        return tuple(PartitionSpec(names) if names else PartitionSpec() for names in axes)

    def bytes_by_leaf(self, bucket: Bucket, sent: int) -> dict[int, float]:
        """Return the shares of the leaves of a bucket in its bytes, by their coordinates."""
        sizes = {index: math.prod(self.parts[index].shape) for index in bucket.leaves}
        whole = sum(sizes.values())
        return {index: sent * size / whole for index, size in sizes.items()}

    @functools.cached_property
    def state_names(self) -> dict[int, str]:
        """Names of states, by the numbers of the buckets whose method carries one.

        They are for methods of the same kind, for the same leaves, and of the same shapes.
        """
        names = {}
        for number, bucket in enumerate(self.buckets):
            if bucket.method.is_stateful:
                first = jax.eval_shape(functools.partial(bucket.method.init_state, bucket.call))
                shapes = [[str(leaf.dtype), list(leaf.shape)] for leaf in jax.tree.leaves(first)]
                names[number] = self.name_of(bucket.method.state_kind, bucket, shapes)
        return names

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
        fast = [[axis.name, axis.size] for axis in self.collective.axes.fast]
        return state_name(kind, leaves, members, bucket.part, bucket.size, fast, *facts)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the buckets in the order in which they are sent; groups share one codec.

        Stripes of the same leaves come together, the first one first. Of the others, the first
        `unrolled_buckets` are alone. Neighbors behind them that are alike come together too.
        """
        buckets = self.buckets
        order = [*range(len(buckets))][:: -1 if self.collective.last_first else 1]
        in_order = [number for number in order if buckets[number].stripe is None]
        apart = {*in_order[: self.request.compression.unrolled_buckets]}

        def together(number: int) -> Hashable:
            bucket = buckets[number]
            of_leaves = () if bucket.stripe is None else bucket.leaves
            return number if number in apart else (bucket.program, of_leaves)

        groups = (tuple(group) for _, group in itertools.groupby(order, key=together))
        return tuple(
            group if buckets[group[0]].stripe is None else tuple(sorted(group)) for group in groups
        )


def plan_tree(
    collective: Collective, tree: Any, request: Request
) -> tuple[Plan, tuple[Array, ...]]:
    """Plan a call inside a program, and return the plan with the leaves of the tree."""
    named, _ = named_leaves(tree)
    shards = find_shards(named, tree, request.compression.specs)
    return make_plan(collective, tree, named, shards, request), tuple(leaf for _, leaf in named)


def make_plan(
    collective: Collective,
    tree: Any,
    named: Sequence[tuple[str, Any]],
    shards: Shards,
    request: Request,
) -> Plan:
    """Plan a call on a tree, of leaves by their paths, whole along the axes of the shards."""
    collective, methods = measured(collective, request), request.compression.policy.methods(tree)
    own = set(collective.axes.names)
    names = tuple(name for name, _ in named)
    whole = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in named)
    parts = tuple(collective.planned(shards.local(n, leaf)) for n, leaf in enumerate(whole))
    split_over = tuple(
        (*sorted(compat.varying_axes(leaf) - own), *shards.axes_of(index))
        for index, (_, leaf) in enumerate(named)
    )
    rules = dataclasses.replace(
        collective.rules(request.compression), names=tuple(f"tree{name}" for name in names)
    )
    found = sort_leaves(
        parts, collective.axes, request, methods, split_over=split_over, rules=rules
    )
    return Plan(
        collective=collective,
        request=request,
        structure=jax.tree.structure(tree),
        names=names,
        leaves=whole,
        shards=shards,
        parts=parts,
        split_over=split_over,
        methods=tuple(methods),
        **found._asdict(),
    )
