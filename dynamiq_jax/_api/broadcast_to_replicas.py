"""Parameters of replicas in a global view, whose gradients are reduced where they are taken."""

from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._worker_loss.fingerprint import salt_of_call
from dynamiq_jax._worker_loss.replicas import Replicas
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology

Tree = TypeVar("Tree")


def broadcast_to_replicas(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array | None = None,
    mean: bool = False,
    mesh: Mesh | None = None,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    specs: Any = None,
    options: Options = Options(),
) -> Tree:
    """Broadcast parameters to a replica for each worker, whose gradients are summed compressed.

    Its transpose is `mean_of_replicas` times the number of workers. So the gradient of a function
    of the parameters is reduced already. It is `dq.pcast` for programs that are one `jax.jit`
    without `shard_map`, where workers are an axis of `jax.vmap`:

        def mean_loss(params, x):  # x: [workers, rows, ...]
            params = dq.broadcast_to_replicas(params, "data", mesh=mesh)
            return jax.vmap(loss_fn, spmd_axis_name="data")(params, x).mean()

    Nothing is sent for leaves that are not differentiated, such as frozen ones.

    Args:
      tree: pytree of parameters. Only floating leaves have gradients.
      axis_name: axis of the mesh of which each worker gets a replica, or several with the slowest
        link first; see `psum`.
      key: PRNG key, a different key at every step. By default it is computed from a sample of the
        tree, and may repeat; see `pcast`.
      mean: whether the sum is divided by the number of workers.
      mesh: the mesh; by default the mesh of `jax.set_mesh`.
      method: compression method or policy, without state; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: split of the parameters over other axes; see `psum`.
      options: leaves whose gradients stay exact, and the size of buckets.

    Returns:
      A tree of the same structure and dtypes, arrays [workers, *shape], whose leading axis is split
      over the axis of the mesh.

    Raises:
      ValueError: as `psum`; the mesh has no such axis.
    """
    compression = resolve(method, topology, options, stateless="broadcast_to_replicas")
    replicas = Replicas(mesh, axis_name, compression, specs)
    salt = None if key is not None else jnp.uint32(salt_of_call("broadcast_to_replicas"))
    return replicas.broadcast(tree, key, salt, mean=mean)[0]
