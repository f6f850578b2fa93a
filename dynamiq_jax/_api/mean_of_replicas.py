"""Means in a global view, where workers are a leading axis of every array."""

import math
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dynamiq_jax._api.psum import pmean
from dynamiq_jax._buckets.axes import AxisName, axis_names
from dynamiq_jax._inputs.options import Options
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._inputs.shards import context_or_automatic
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology

P = PartitionSpec
Tree = TypeVar("Tree")


def mean_of_replicas(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array,
    mesh: Mesh | None = None,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    specs: Any = None,
    options: Options = Options(),
) -> Tree:
    """Average a pytree over its leading axis of replicas, compressed on the wire.

    For programs that are one `jax.jit` without `shard_map`, in which replicas are stacked and the
    leading axis is sharded, as `jax.vmap(..., spmd_axis_name=axis_name)` and `drjax.reduce_mean`
    have them. The result equals `jax.tree.map(lambda x: x.mean(0), tree)` up to the error of the
    codec.

    Args:
      tree: pytree of arrays [replicas, *shape], one replica for each worker of the axis.
      axis_name: axis of the mesh over which the leading axis is split; see `psum`.
      key: PRNG key, another one at every call.
      mesh: the mesh; by default that of `jax.set_mesh`.
      method: compression method without state; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: how one replica, without the leading axis, is split over other axes; see `psum`.
      options: leaves that stay exact, and the size of buckets.

    Returns:
      A tree of the same structure and dtypes, arrays [*shape], the same on all workers.

    Raises:
      ValueError: a leading axis of another size than the axis; and as `psum`.
    """
    names = axis_names(axis_name)
    shape = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    if not names or not set(names) <= set(shape):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh, whose axes are {tuple(shape)}. "
            "Give one of them, and the mesh as mesh= or by jax.set_mesh."
        )
    num_workers = math.prod(shape[name] for name in names)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if np.shape(leaf)[:1] != (num_workers,):
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, whose leading axis "
                f"is not one replica for each of the {num_workers} workers of axis {axis_name!r}. "
                "Stack replicas along the first axis."
            )

    def local(stacked: Tree, key: Array) -> Tree:
        own = jax.tree.map(lambda leaf: leaf[0], stacked)
        return pmean(
            own, axis_name, key=key, method=method, topology=topology, specs=specs, options=options
        )

    mapped = jax.shard_map(
        local,
        mesh=context_or_automatic(mesh),
        in_specs=(P(names), P()),
        out_specs=P(),
        axis_names=set(names),
    )
    return mapped(tree, key)
