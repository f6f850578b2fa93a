"""The two halves of the all-reduce, for gradients and parameters that are sharded (ZeRO, FSDP)."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax import buckets, checks, compat, exact
from dynamiq_jax.axes import Axes, find_axes
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.no_gradient import refuse_gradient
from dynamiq_jax.topologies import Auto, Topology

Tree = TypeVar("Tree")

_GATHER = 0x67617468  # keeps the noise of a gather apart from that of a scatter with the same key


def psum_scatter(
    tree: Tree,
    axis_name: str,
    *,
    key: Array,
    scatter_dimension: int = 0,
    tiled: bool = False,
    method: Method | str = DynamiQ(),
    topology: Topology | Auto | str = "ring",
    mask: Any | Callable[[Any], Any] | None = None,
    exact_below: int = buckets.EXACT_BELOW,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> Tree:
    """Sum over an axis of which each worker gets its part, like `jax.lax.psum_scatter`, compressed.

    The sums themselves are never compressed, only what travels: one compression less than `psum`.

    Args:
      tree: pytree of arrays; floating leaves of at least `exact_below` elements are compressed.
      axis_name: one axis; not several.
      key: typed PRNG key, the same on all workers, another one at every call.
      scatter_dimension: dimension of every leaf that is scattered: of the size of the axis, or
        divided by it if tiled.
      tiled: keep that dimension, divided by the size of the axis; otherwise it goes.
      method: how numbers become bytes.
      topology: how chunks travel.
      mask: leaves marked False are summed exactly; see `psum`.
      exact_below: leaves of fewer elements are summed exactly.
      bucket_bytes: bytes of gradient that are compressed together; see `psum`.

    Returns:
      A tree of the same structure and dtypes with the worker's part of every leaf.

    Raises:
      ValueError: as `psum`; a dimension that does not divide.

    >>> import jax, jax.numpy as jnp
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 512, 64))
    >>> reduce = lambda g: psum_scatter(g, "data", key=jax.random.key(1), tiled=True)
    >>> jax.jit(jax.vmap(reduce, axis_name="data"))(gradients).shape
    (2, 256, 64)
    """
    axes = _one_axis(axis_name)
    key = checks.check_key(key, axes.names)
    options = buckets.resolve_options(method, topology, exact_below, bucket_bytes)
    named, structure = buckets.leaves_to_sum(tree, axes)
    leaves, n = [leaf for _, leaf in named], axes.num_workers
    for name, leaf in named:
        checks.check_scatters(name, leaf, scatter_dimension, n, tiled)
    flags = buckets.mask_flags(mask, tree)
    plan = buckets.plan(
        leaves, axes, options, compress=flags, kinds=buckets.other_axes(leaves, axes)
    )
    result: dict[int, Any] = {}
    for index in plan.untouched:
        shape = list(leaves[index].shape)
        shape[scatter_dimension : scatter_dimension + 1] = (
            [shape[scatter_dimension] // n] if tiled else []
        )
        result[index] = np.zeros(shape, leaves[index].dtype)
    for index, _ in plan.exact:
        result[index] = exact.reduce_scatter(
            leaves[index], axes.slow, scatter_dimension, tiled=tiled
        )
    earlier = None
    for number, bucket in reversed(list(enumerate(plan.buckets))):
        parts = {i: _by_worker(leaves[i], scatter_dimension, n) for i in bucket.leaves}
        flat = jnp.concatenate([part.reshape(n, -1) for part in parts.values()], axis=1)
        granule = SUPER_GROUP_SIZE * bucket.topology.chunks_per_worker
        padded = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % granule))).reshape(-1)
        total = options.method.reduce_scatter(
            buckets.after(
                earlier, refuse_gradient(padded.astype(buckets.wire_dtype(bucket.dtype)))
            ),
            axes.slow,
            n,
            topology=bucket.topology,
            key=jax.random.fold_in(key, number),
        )
        earlier = total
        mine = {i: jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for i, part in parts.items()}
        for index, piece in buckets.unflatten(bucket, total[: flat.shape[1]], mine).items():
            moved = jnp.moveaxis(piece, 0, scatter_dimension)
            result[index] = moved if tiled else jnp.squeeze(moved, scatter_dimension)
    return jax.tree.unflatten(structure, [result[index] for index in range(len(leaves))])


def all_gather(
    tree: Tree,
    axis_name: str,
    *,
    key: Array,
    axis: int = 0,
    tiled: bool = False,
    method: Method | str = DynamiQ(),
    mask: Any | Callable[[Any], Any] | None = None,
    exact_below: int = buckets.EXACT_BELOW,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> Tree:
    """Parts of all workers on each worker, like `jax.lax.all_gather`, compressed.

    The other half of the all-reduce: `all_gather` of the result of `psum_scatter` is a sum with one
    more compression. All workers, the owner of a part too, get the same bits.

    Args:
      tree: pytree of arrays; floating leaves of at least `exact_below` elements, once gathered, are
        compressed.
      axis_name: one axis; not several.
      key: typed PRNG key, the same on all workers, another one at every step; that of the
        `psum_scatter` before will do.
      axis: dimension of the result along which the parts lie; a negative one counts from the end.
      tiled: join the parts along that dimension; otherwise it is a new one.
      method: how numbers become bytes.
      mask: leaves marked False are gathered exactly; see `psum`.
      exact_below: leaves of fewer elements, once gathered, are gathered exactly.
      bucket_bytes: bytes, once gathered, that are compressed together, the first leaves first.

    Returns:
      A tree of the same structure and dtypes with all of every leaf.

    Raises:
      ValueError: as `psum`; no such dimension.

    >>> import jax, jax.numpy as jnp
    >>> parts = jax.random.normal(jax.random.key(0), (2, 256, 64))
    >>> gather = lambda x: all_gather(x, "data", key=jax.random.key(1), tiled=True)
    >>> jax.jit(jax.vmap(gather, axis_name="data"))(parts).shape
    (2, 512, 64)
    """
    axes = _one_axis(axis_name)
    key = jax.random.fold_in(checks.check_key(key, axes.names), _GATHER)
    options = buckets.resolve_options(method, "ring", exact_below, bucket_bytes)
    named, structure = buckets.named_leaves(tree)
    leaves, n = [leaf for _, leaf in named], axes.num_workers
    dimensions = [checks.check_gathers(name, leaf, axis, tiled) for name, leaf in named]
    plan = buckets.plan(
        [jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype) for leaf in leaves],
        axes,
        options,
        compress=buckets.mask_flags(mask, tree),
        kinds=buckets.other_axes(leaves, axes),
    )
    gathered = {index: compat.all_gather(leaves[index], axes.slow) for index, _ in plan.exact}
    earlier = None
    for number, bucket in enumerate(plan.buckets):
        flat = buckets.flatten(bucket, leaves)
        padded = refuse_gradient(jnp.pad(flat, (0, -flat.size % SUPER_GROUP_SIZE)))
        every = options.method.all_gather(
            buckets.after(earlier, padded),
            axes.slow,
            n,
            key=jax.random.fold_in(key, number),
        )
        earlier = every.arrived
        parts = every.decode().reshape(n, -1)[:, : flat.size]
        gathered |= jax.vmap(lambda part, b=bucket: buckets.unflatten(b, part, leaves))(parts)
    result: list[Any] = []
    for index, (leaf, dimension) in enumerate(zip(leaves, dimensions, strict=True)):
        shape = list(leaf.shape)
        if tiled:
            shape[dimension] *= n
        else:
            shape.insert(dimension, n)
        if index in plan.untouched:
            result.append(np.zeros(shape, leaf.dtype))
        else:
            result.append(jnp.moveaxis(gathered[index], 0, dimension).reshape(shape))
    return jax.tree.unflatten(structure, result)


def _one_axis(axis_name: Any) -> Axes:
    axes = find_axes(axis_name)
    if axes.fast:
        raise ValueError(
            f"axis_name={axis_name!r} names {len(axes.names)} axes; dq.psum_scatter and "
            "dq.all_gather take one. Use jax.lax's over the fast axes and these over the slow one."
        )
    return axes


def _by_worker(leaf: Array, dimension: int, num_workers: int) -> Array:
    """A leaf as [workers, its part of the scattered dimension, the other dimensions]."""
    moved = jnp.moveaxis(leaf, dimension, 0)
    return moved.reshape(num_workers, -1, *moved.shape[1:])
