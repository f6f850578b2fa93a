"""Static plan of a collective: which leaves are compressed together, which stay exact, and why."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.options import Compression
from dynamiq_jax._core import WireCost
from dynamiq_jax.methods import Call
from dynamiq_jax.topologies import FixedTopology


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are flattened into one vector and compressed together."""

    leaves: tuple[int, ...]  # indices into the flattened tree
    dtype: jnp.dtype
    size: int  # coordinates
    call: Call  # the all-reduce of a worker's part, which is less than the bucket beside fast axes
    cost: WireCost

    @property
    def bytes_sent(self) -> int:
        """Bytes that each worker sends over the slow axis in an all-reduce."""
        return self.call.topology.bytes_sent(self.cost, self.call.num_workers)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Buckets and exact leaves of a tree: a function of shapes and dtypes."""

    buckets: tuple[Bucket, ...]
    exact: tuple[tuple[int, str], ...]  # (leaf index, why)
    untouched: tuple[int, ...]  # leaves of dtype float0, which hold nothing


def make_plan(
    leaves: Sequence[Any],
    axes: Axes,
    how: Compression,
    *,
    compress: Sequence[bool] | None = None,
    kinds: Sequence[Hashable] | None = None,
) -> Plan:
    """Sort leaves into buckets.

    Args:
      leaves: anything with `shape` and `dtype`.
      axes: axes of the collective.
      how: method, topology and options.
      compress: False for leaves that stay exact by the mask.
      kinds: leaves of different kinds never share a bucket.
    """
    exact: list[tuple[int, str]] = []
    untouched: list[int] = []
    by_kind: dict[tuple[jnp.dtype, Hashable], list[tuple[int, int]]] = {}
    for index, leaf in enumerate(leaves):
        size = math.prod(leaf.shape)
        if leaf.dtype == jax.dtypes.float0:
            untouched.append(index)
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            exact.append((index, f"dtype {leaf.dtype} is not a real floating type"))
        elif axes.slow.size == 1:
            exact.append((index, "one worker has nothing to send"))
        elif compress is not None and not compress[index]:
            exact.append((index, "masked"))
        elif size < max(how.options.exact_below, 1):
            limit = how.options.exact_below
            exact.append((index, f"{size} elements are fewer than exact_below={limit}"))
        else:
            kind = (jnp.dtype(leaf.dtype), kinds[index] if kinds is not None else None)
            by_kind.setdefault(kind, []).append((index, size))
    buckets = []
    for (dtype, _), members in by_kind.items():
        for group in _cut(members, how.options.bucket_bytes // dtype.itemsize):
            indices, sizes = zip(*group, strict=True)
            size = sum(sizes)
            # A part of a bucket has no shapes.
            shapes = None if axes.fast else tuple(leaves[index].shape for index in indices)
            part_size = axes.part_size(size, how.method.granule)
            call, cost, why_exact = _choose(part_size, axes, shapes, how)
            if why_exact:
                exact += [(index, why_exact) for index in indices]
            else:
                buckets.append(Bucket(indices, dtype, size, call, cost))
    return Plan(tuple(buckets), tuple(sorted(exact)), tuple(untouched))


def _cut(members: list[tuple[int, int]], limit: int) -> list[list[tuple[int, int]]]:
    """Cut consecutive (leaf, size) into lists of at most `limit` coordinates, or of one leaf."""
    lists: list[list[tuple[int, int]]] = []
    room = 0
    for index, size in members:
        if size > room or not lists:
            lists.append([])
            room = limit
        lists[-1].append((index, size))
        room -= size
    return lists


def _choose(
    size: int, axes: Axes, shapes: Any, how: Compression
) -> tuple[Call, WireCost, str | None]:
    """Return the all-reduce of a part, its cost, and the reason to keep it exact, if any."""
    num_workers = axes.slow.size

    def call_on(topology: FixedTopology) -> Call:
        return Call(size=size, axis=axes.slow, topology=topology, shapes=shapes)

    topology, why_exact = how.topology.choose(
        size, num_workers, lambda topology: how.method.wire_cost(call_on(topology))
    )
    topology.check(num_workers)
    call = call_on(topology)
    cost = how.method.wire_cost(call)
    exact = WireCost(payload_bytes=4 * -(-size // call.num_chunks))  # float32
    if topology.bytes_sent(cost, num_workers) > topology.bytes_sent(exact, num_workers):
        why_exact = f"{size} coordinates over {num_workers} workers are too few to save bytes"
    return call, cost, why_exact
