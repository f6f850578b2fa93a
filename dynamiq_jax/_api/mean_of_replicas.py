"""Means in a global view, where workers are a leading axis of every array."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._worker_loss.replicas import Replicas
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology

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
      key: PRNG key, a different key at every call.
      mesh: the mesh; by default the mesh of `jax.set_mesh`.
      method: compression method or policy, without state; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: split of one replica, without the leading axis, over other axes; see `psum`.
      options: leaves that stay exact, and the size of buckets.

    Returns:
      A tree of the same structure and dtypes, arrays [*shape], the same on all workers.

    Raises:
      ValueError: as `psum`; a leading axis of another size than the number of workers.
    """
    compression = resolve(method, topology, options, stateless="mean_of_replicas")
    replicas = Replicas(mesh, axis_name, compression, specs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if np.shape(leaf)[:1] != (replicas.count,):
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} has shape {np.shape(leaf)}, whose leading axis "
                f"is not one replica for each of the {replicas.count} workers of axis "
                f"{axis_name!r}. Stack replicas along the first axis."
            )
    mean, _ = replicas.all_reduce(tree, key, mean=True)
    return mean
