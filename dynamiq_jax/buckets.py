"""A pytree to buckets and back: which leaves are compressed together, which are summed exactly, and
why.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import checks, compat
from dynamiq_jax.axes import Axes
from dynamiq_jax.chunks import WireCost
from dynamiq_jax.methods import Method, resolve_method
from dynamiq_jax.topologies import Auto, Topology, resolve_topology

# A leaf of fewer elements is summed exactly: biases and norm scales are a thousandth of the bytes
# and the most sensitive.
EXACT_BELOW = 1024

# Large enough for messages that fill a fast link, and for a model of a hundred million parameters
# to compile few buckets; small enough for the first one to leave early in a backward pass.
BUCKET_BYTES = 2**27


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are flattened into one vector and compressed together."""

    leaves: tuple[int, ...]  # indices into the flattened tree
    dtype: jnp.dtype
    size: int  # coordinates
    part_size: int  # coordinates that a worker compresses, less than `size` beside fast axes
    method: Method
    topology: Topology
    cost: WireCost


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to every leaf. Static: a function of shapes and dtypes."""

    buckets: tuple[Bucket, ...]
    exact: tuple[tuple[int, str], ...]  # (leaf index, why)
    untouched: tuple[int, ...]  # leaves of dtype float0, which hold nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the user says about compression, the same for every collective."""

    method: Method
    topology: Topology | Auto
    exact_below: int = EXACT_BELOW  # leaves of fewer elements are summed exactly
    bucket_bytes: int = BUCKET_BYTES  # a bucket of more holds one leaf only

    def __post_init__(self):
        if not _is_integer(self.exact_below, least=0):
            raise ValueError(
                f"exact_below={self.exact_below!r} is not a number of elements. Give 0 to compress "
                f"all leaves, or a positive integer, such as {EXACT_BELOW}."
            )
        if not _is_integer(self.bucket_bytes, least=1):
            raise ValueError(
                f"bucket_bytes={self.bucket_bytes!r} is not a number of bytes. Give a positive "
                f"integer, such as {BUCKET_BYTES}."
            )


def _is_integer(value: Any, least: int) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= least


def resolve_options(
    method: Method | str, topology: Topology | Auto | str, exact_below: int, bucket_bytes: int
) -> Options:
    """Options as the user gives them, by name or by value."""
    return Options(
        method=resolve_method(method),
        topology=resolve_topology(topology),
        exact_below=exact_below,
        bucket_bytes=bucket_bytes,
    )


def named_leaves(tree: Any) -> tuple[list[tuple[str, Array]], Any]:
    """Leaves of a tree as arrays, with the names that errors call them; and its structure.

    Raises:
      TypeError: a leaf that is not an array or number.
      ValueError: a leaf that cannot be made part of a flat vector.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = []
    for path, leaf in paths_and_leaves:
        if isinstance(leaf, bool | int | float | complex | np.number):
            leaf = jnp.asarray(leaf)
        name = jax.tree_util.keystr(path)
        checks.check_leaf(name, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.check_flattens(name, leaf)
        named.append((name, leaf))
    return named, structure


def leaves_to_sum(tree: Any, axes: Axes) -> tuple[list[tuple[str, Array]], Any]:
    """`named_leaves` of which none is already summed over an axis, which raises ValueError."""
    named, structure = named_leaves(tree)
    for name, leaf in named:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.check_not_reduced(name, leaf, axes.names)
    return named, structure


def other_axes(leaves: Sequence[Any], axes: Axes) -> list[frozenset[str]]:
    """Other axes that each leaf varies over. A leaf that is replicated over such an axis must not
    share a bucket, and so the order of its rows, with one that differs along it.
    """
    return [compat.varying_axes(leaf) - set(axes.names) for leaf in leaves]


def plan(
    leaves: Sequence[Any],
    axes: Axes,
    options: Options,
    *,
    compress: Sequence[bool] | None = None,
    kinds: Sequence[Hashable] | None = None,
) -> Plan:
    """Sorts leaves into buckets.

    Args:
      leaves: anything with `shape` and `dtype`.
      axes: what is reduced over.
      options: how.
      compress: False for leaves that the user wants exact.
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
        elif axes.num_slow == 1:
            exact.append((index, "one worker has nothing to send"))
        elif compress is not None and not compress[index]:
            exact.append((index, "masked"))
        elif size < max(options.exact_below, 1):
            exact.append(
                (index, f"{size} elements are fewer than exact_below={options.exact_below}")
            )
        else:
            kind = (jnp.dtype(leaf.dtype), kinds[index] if kinds is not None else None)
            by_kind.setdefault(kind, []).append((index, size))
    buckets = []
    for (dtype, _), members in by_kind.items():
        for leaves_of_bucket in _cut(members, options.bucket_bytes // dtype.itemsize):
            indices = tuple(index for index, _ in leaves_of_bucket)
            size = sum(size for _, size in leaves_of_bucket)
            part_size = axes.part_size(size)
            method = options.method
            if not axes.fast:  # a part of a bucket has no shapes
                method = method.for_leaves(tuple(leaves[index].shape for index in indices))
            topology, cost, why_not = _carrier(part_size, axes.num_slow, method, options.topology)
            if why_not:
                exact += [(index, why_not) for index in indices]
            else:
                buckets.append(Bucket(indices, dtype, size, part_size, method, topology, cost))
    return Plan(tuple(buckets), tuple(sorted(exact)), tuple(untouched))


def _cut(members: list[tuple[int, int]], limit: int) -> list[list[tuple[int, int]]]:
    """Consecutive (leaf, size) in lists of at most `limit` coordinates, or of one leaf."""
    lists: list[list[tuple[int, int]]] = []
    room = 0
    for index, size in members:
        if size > room or not lists:
            lists.append([])
            room = limit
        lists[-1].append((index, size))
        room -= size
    return lists


def _carrier(
    size: int, num_workers: int, method: Method, topology: Topology | Auto
) -> tuple[Topology, WireCost, str | None]:
    """What carries a part of `size` coordinates, at what cost; and why it had better be exact."""
    why_not = None
    if isinstance(topology, Auto):
        topology, why_not = topology.choose(method, size, num_workers)
    topology.check(num_workers)
    cost = method.wire_cost(size, num_workers, topology.num_chunks(num_workers))
    if bytes_sent(cost, topology, num_workers) > exact_bytes_sent(size, topology, num_workers):
        why_not = f"{size} coordinates over {num_workers} workers are too few to save bytes"
    return topology, cost, why_not


def mask_flags(mask: Any | Callable[[Any], Any] | None, tree: Any) -> list[bool] | None:
    """A mask as one flag for every leaf of a tree, in flattened order; None if there is no mask.

    Args:
      mask: pytree of bools like the tree (a prefix will do), or a function from the tree to one.
      tree: what it is for.

    Raises:
      ValueError: the mask does not fit the tree.
    """
    if mask is None:
        return None
    prefix = mask(tree) if callable(mask) else mask
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
    except ValueError as error:
        raise ValueError(
            f"mask={prefix!r:.200} does not fit the tree: {error}. Give a tree of bools "
            "with their structure, or a prefix of it."
        ) from None
    return [bool(flag) for flag in flags]


def bytes_sent(cost: WireCost, topology: Topology, num_workers: int) -> int:
    """Bytes that each worker sends for one bucket."""
    return cost.statistics_bytes + topology.payloads_sent(num_workers) * cost.payload_bytes


def exact_bytes_sent(size: int, topology: Topology, num_workers: int) -> int:
    """Bytes that each worker sends where `size` coordinates travel as float32."""
    chunk_size = -(-size // topology.num_chunks(num_workers))
    return topology.payloads_sent(num_workers) * 4 * chunk_size


def flatten(bucket: Bucket, leaves: Sequence[Array]) -> Array:
    """Joins a bucket's leaves into one vector [size]."""
    flat = jnp.concatenate([leaves[index].reshape(-1) for index in bucket.leaves])
    return flat.astype(wire_dtype(bucket.dtype))


def wire_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """What methods take: float64 goes through float32."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float64 else dtype


def after(earlier: Array | None, flat: Array) -> Array:
    """The same values, not there before `earlier` is: one bucket after the other.

    Otherwise XLA joins transfers of several buckets, or has them all wait for one, and none is left
    to run under the backward pass. It removes `lax.optimization_barrier` before it does so; that
    this comparison is always true, it cannot know.
    """
    if earlier is None or not compat.varying_axes(earlier) <= compat.varying_axes(flat):
        return flat
    bits = lax.bitcast_convert_type(earlier[0].astype(jnp.float32), jnp.uint32)
    return jnp.where((bits & 255) >> 8 == 0, flat, jnp.zeros_like(flat))


def unflatten(
    bucket: Bucket, flat: Array, leaves: Sequence[Any] | Mapping[int, Any]
) -> dict[int, Array]:
    """Inverse of `flatten`: leaf index to array, with shapes as in `leaves` (arrays, or anything
    with a shape) and the dtype of the bucket.
    """
    sizes = [math.prod(leaves[index].shape) for index in bucket.leaves]
    parts = jnp.split(flat, np.cumsum(sizes)[:-1]) if len(sizes) > 1 else [flat]
    return {
        index: part.reshape(leaves[index].shape).astype(bucket.dtype)
        for index, part in zip(bucket.leaves, parts, strict=True)
    }
