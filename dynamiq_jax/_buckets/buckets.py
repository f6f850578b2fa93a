"""Sorting of leaves into buckets, which are compressed, and leaves that stay exact."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.dealing import Dealing, Stripe, number_of_stripes
from dynamiq_jax._core import MOST_IN_BUCKET, WireCost
from dynamiq_jax._inputs.compression import Bucketing
from dynamiq_jax._inputs.request import Request
from dynamiq_jax.methods import Call, Method
from dynamiq_jax.topologies import Topology

_LEAST_PART = 2**16  # coordinates: smaller parts cost more in messages than they save in memory

Members = dict[int, tuple[int, ...]]  # leaves by index, with their shapes
Part = tuple[int, int]  # first slice along the first dimension, and the one after the last


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are flattened into one vector and compressed together."""

    leaves: tuple[int, ...]  # indices into the flattened tree
    method: Method
    dtype: jnp.dtype
    size: int  # coordinates
    split_over: tuple[str, ...]  # further axes along which the values of devices differ
    part: Part | None  # of its only leaf, where that is in several buckets
    stripe: Stripe | None  # of all of its leaves, where these are in several buckets
    call: Call  # the all-reduce of a worker's part, which is less than the bucket beside fast axes
    cost: WireCost

    @property
    def program(self) -> "Bucket":
        """Everything that the compiled program depends on: the bucket without its place."""
        return dataclasses.replace(self, leaves=(), part=None, stripe=None)

    @property
    def bytes_sent(self) -> int:
        """Bytes that each worker sends over the slow axis in an all-reduce."""
        return self.call.topology.bytes_sent(self.cost, self.call.num_workers)

    def is_too_large(self, copies: int) -> bool:
        """Return whether indices into the bucket, or into its messages, exceed an int32."""
        sent = self.call.num_chunks * self.cost.payload_bytes
        return max(self.size, sent) > copies * MOST_IN_BUCKET


@dataclasses.dataclass(frozen=True)
class CutRules:
    """Rules of a collective for cutting leaves into buckets."""

    into: Bucketing
    into_parts: bool = True  # whether a large leaf may be cut along its first dimension
    # Whether leaves that are too large for one bucket may be cut into stripes all the same.
    into_stripes: bool = True
    copies: int = 1  # workers whose parts count in the size of a bucket; a program holds one part
    names: tuple[str, ...] = ()  # of the leaves, for errors


class Sorted(NamedTuple):
    """Leaves of a tree, sorted into buckets and others: a function of shapes and dtypes."""

    buckets: tuple[Bucket, ...]
    exact: tuple[tuple[int, str], ...]  # (leaf index, why)
    untouched: tuple[int, ...]  # leaves of dtype float0, which hold nothing


def sort_leaves(
    leaves: Sequence[Any],
    axes: Axes,
    request: Request,
    methods: Sequence[Method | None],
    *,
    split_over: Sequence[tuple[str, ...]],
    rules: CutRules,
) -> Sorted:
    """Sort leaves into buckets, by their methods of the policy; None is an uncompressed leaf.

    Leaves whose values differ along other further axes (`split_over`) never share a bucket, so that
    one that is the same along an axis stays the same.

    Raises:
      ValueError: a leaf that is too large for one bucket, and cannot be cut.
    """
    exact: list[tuple[int, str]] = []
    untouched: list[int] = []
    by_kind: dict[_Kind, Members] = {}
    for index, leaf in enumerate(leaves):
        size = math.prod(leaf.shape)
        if leaf.dtype == jax.dtypes.float0:
            untouched.append(index)
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            exact.append((index, f"dtype {leaf.dtype} is not a real floating type"))
        elif axes.slow.size == 1:
            exact.append((index, "an axis of one worker sends nothing"))
        elif (method := methods[index]) is None:
            exact.append((index, "by the policy"))
        elif size < max(request.compression.exact_below, 1):
            limit = request.compression.exact_below
            exact.append((index, f"{size} elements are fewer than exact_below={limit}"))
        else:
            dtype = jnp.dtype(leaf.dtype)
            kind = _Kind(axes, request.compression.route, method, dtype, split_over[index])
            by_kind.setdefault(kind, {})[index] = leaf.shape
    buckets: list[Bucket] = []
    for kind, members in by_kind.items():
        limit = max(request.compression.bucket_bytes // kind.dtype.itemsize, 1)
        largest = min(limit, sum(map(math.prod, members.values())))
        while not kind.fits(largest, rules.copies):
            limit = largest = largest // 2
        # XLA for TPUs moves the rows of stripes one by one, which takes longer than the kernels of
        # the codec (benchmarks/aot/tpu.py).
        free = kind.topology.is_loop and jax.default_backend() != "tpu"
        if rules.into == "striped" or (rules.into == "auto" and free):
            striped, _ = kind.striped(members, limit)
            buckets += striped
            if striped:
                continue
        for group in _group(members, limit):
            in_order, why_exact = kind.in_order(group, limit if rules.into_parts else None)
            if any(bucket.is_too_large(rules.copies) for bucket in in_order):
                if not rules.into_stripes or kind.method.uses_shapes:
                    _refuse(group, kind.method, rules)
                in_order, why_exact = kind.striped(group, limit)
            buckets += in_order
            exact += [(index, why_exact) for index in group if why_exact]
    # In the order of the leaves, whatever their methods: a backward pass has the last ones first.
    buckets.sort(key=lambda bucket: bucket.leaves[0])
    return Sorted(tuple(buckets), tuple(sorted(exact)), tuple(untouched))


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Properties that all leaves of a bucket have in common."""

    axes: Axes
    topology: Topology
    method: Method
    dtype: jnp.dtype
    split_over: tuple[str, ...]

    def fits(self, size: int, copies: int) -> bool:
        """Return whether leaves with `size` coordinates together fit into one bucket."""
        # Shapes are those of a bucket, which is checked once it is there.
        return self.method.uses_shapes or not self._bucket((), size).is_too_large(copies)

    def striped(self, members: Members, limit: int) -> tuple[list[Bucket], str]:
        """Cut members into stripes, or return the reason to keep them exact.

        Both are empty where the method needs shapes.
        """
        if self.method.uses_shapes:
            return [], ""
        indices, sizes = tuple(members), tuple(map(math.prod, members.values()))
        fewest = -(-sum(sizes) // max(limit, _LEAST_PART))
        count = number_of_stripes(fewest, [*members.values()])
        size = sum(sizes) if count == 1 else Dealing(sizes, count).size
        if why_exact := _choose(self, size, None)[2]:
            return [], why_exact
        if count == 1:
            return [self._bucket(indices, size)], ""
        stripes = (Stripe(number, count) for number in range(count))
        return [self._bucket(indices, size, stripe=stripe) for stripe in stripes], ""

    def in_order(self, group: Members, limit: int | None) -> tuple[list[Bucket], str]:
        """Make a bucket of members, or parts of one, or return the reason to keep them exact.

        Parts have at most `limit` coordinates. With None, leaves stay whole.
        """
        indices, shapes = tuple(group), tuple(group.values())
        size, shape = sum(map(math.prod, shapes)), shapes[0]
        # A part of a bucket has no shapes.
        known = shapes if self.method.uses_shapes and not self.axes.fast else None
        may_cut = len(group) == 1 and not self.axes.fast and not self.method.uses_shapes
        step = _step(shape, max(limit, _LEAST_PART)) if may_cut and limit else size
        if any(_choose(self, part, known)[2] for part in {step, size % step} - {0}):
            step = size  # parts are too small: rather one bucket
        if why_exact := _choose(self, step, known)[2]:
            return [], why_exact
        if step == size:
            return [self._bucket(indices, size, known)], ""
        length, buckets = size // shape[0], []
        for start in range(0, size, step):
            stop = min(start + step, size)
            part = start // length, stop // length
            buckets.append(self._bucket(indices, stop - start, part=part))
        return buckets, ""

    def _bucket(
        self,
        leaves: tuple[int, ...],
        size: int,
        shapes: Any = None,
        *,
        part: Part | None = None,
        stripe: Stripe | None = None,
    ) -> Bucket:
        call, cost, _ = _choose(self, size, shapes)
        of_kind = self.method, self.dtype, size, self.split_over
        return Bucket(leaves, *of_kind, part, stripe, call, cost)


def _refuse(group: Members, method: Method, rules: CutRules) -> NoReturn:
    """Raise ValueError for leaves of which the largest is too large and cannot be cut."""
    size, index = max((math.prod(shape), index) for index, shape in group.items())
    needs = f"method={method!r} needs the shape of" if method.uses_shapes else "this call sends"
    raise ValueError(
        f"{rules.names[index]} has {size // rules.copies:,} coordinates, too many for one bucket, "
        f"and {needs} whole leaves. A bucket has at most {MOST_IN_BUCKET:,} coordinates, and as "
        "many bytes in its messages: indices are int32. Cut the leaf into several, shard it over "
        "more devices, or give it another method or fewer bits."
    )


def _group(members: Members, limit: int) -> list[Members]:
    """Group consecutive leaves, of at most `limit` coordinates together, or of one leaf."""
    groups: list[Members] = []
    room = 0
    for index, shape in members.items():
        size = math.prod(shape)
        if size > room or not groups:
            groups.append({})
            room = limit
        groups[-1][index] = shape
        room -= size
    return groups


def _step(shape: tuple[int, ...], limit: int) -> int:
    """Return the coordinates of each part of a leaf, cut along its first dimension.

    Parts have at most `limit` coordinates, or one slice. They are equal if possible.
    """
    size = math.prod(shape)
    if size <= limit or not shape:
        return size
    fewest = -(-shape[0] // max(1, limit * shape[0] // size))
    numbers = range(fewest, min(2 * fewest, fewest + 64) + 1)
    even = (number for number in numbers if shape[0] % number == 0)
    return -(-shape[0] // next(even, fewest)) * (size // shape[0])


@functools.lru_cache(maxsize=1024)
def _choose(kind: _Kind, size: int, shapes: Any) -> tuple[Call, WireCost, str | None]:
    """Return the all-reduce of a worker's part, its cost, and any reason to keep it exact."""
    axes, topology, num_workers = kind.axes, kind.topology, kind.axes.slow.size
    topology.check(num_workers)
    part = axes.part_size(size, kind.method.granule)
    call = Call(size=part, axis=axes.slow, topology=topology, shapes=shapes)
    cost = kind.method.wire_cost(call)
    exact = WireCost(payload_bytes=4 * -(-part // call.num_chunks))  # float32
    if topology.bytes_sent(cost, num_workers) <= topology.bytes_sent(exact, num_workers):
        return call, cost, None
    why_exact = f"{part} coordinates over {num_workers} workers are too few to save bytes"
    return call, cost, why_exact
