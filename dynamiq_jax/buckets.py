"""A pytree to buckets and back: which leaves are compressed together, which are summed exactly, and
why.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.methods.base import Method, WireCost
from dynamiq_jax.topologies.base import Topology

# A leaf of fewer elements is summed exactly: biases and norm scales are a thousandth of the bytes
# and the most sensitive.
EXACT_BELOW = 1024


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are flattened into one vector and compressed together."""

    leaves: tuple[int, ...]  # indices into the flattened tree
    dtype: jnp.dtype
    size: int  # coordinates
    cost: WireCost


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to every leaf. Static: a function of shapes and dtypes."""

    buckets: tuple[Bucket, ...]
    exact: tuple[tuple[int, str], ...]  # (leaf index, why)
    untouched: tuple[int, ...]  # leaves of dtype float0, which hold nothing


def plan(
    leaves: Sequence[Any],
    num_workers: int,
    *,
    method: Method,
    topology: Topology,
    compress: Sequence[bool] | None = None,
    exact_below: int = EXACT_BELOW,
    kinds: Sequence[Hashable] | None = None,
) -> Plan:
    """Sorts leaves into buckets.

    Args:
      leaves: anything with `shape` and `dtype`.
      num_workers: size of the axis.
      method: what compresses a bucket.
      topology: what carries it.
      compress: False for leaves that the user wants exact.
      exact_below: leaves of fewer elements are summed exactly.
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
        elif num_workers == 1:
            exact.append((index, "one worker has nothing to send"))
        elif compress is not None and not compress[index]:
            exact.append((index, "masked"))
        elif size < max(exact_below, 1):
            exact.append((index, f"{size} elements are fewer than exact_below={exact_below}"))
        else:
            kind = (jnp.dtype(leaf.dtype), kinds[index] if kinds is not None else None)
            by_kind.setdefault(kind, []).append((index, size))
    buckets = []
    for (dtype, _), members in by_kind.items():
        size = sum(size for _, size in members)
        cost = method.wire_cost(size, num_workers, topology.num_chunks(num_workers))
        if bytes_sent(cost, topology, num_workers) <= exact_bytes_sent(size, topology, num_workers):
            buckets.append(Bucket(tuple(index for index, _ in members), dtype, size, cost))
        else:
            exact += [
                (index, f"{size} coordinates over {num_workers} workers are too few to save bytes")
                for index, _ in members
            ]
    return Plan(tuple(buckets), tuple(sorted(exact)), tuple(untouched))


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
            f"mask={prefix!r:.200} does not fit the gradients: {error}. Give a tree of bools "
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
    """Joins a bucket's leaves into one vector [size] of its dtype."""
    return jnp.concatenate([leaves[index].reshape(-1) for index in bucket.leaves])


def unflatten(bucket: Bucket, flat: Array, leaves: Sequence[Array]) -> dict[int, Array]:
    """Inverse of `flatten`: leaf index to array, with shapes as in `leaves` and the dtype of the
    bucket.
    """
    sizes = [leaves[index].size for index in bucket.leaves]
    parts = jnp.split(flat, np.cumsum(sizes)[:-1]) if len(sizes) > 1 else [flat]
    return {
        index: part.reshape(leaves[index].shape).astype(bucket.dtype)
        for index, part in zip(bucket.leaves, parts, strict=True)
    }
