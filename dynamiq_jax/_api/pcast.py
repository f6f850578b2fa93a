"""The compressed sum as the transpose of a cast: gradients are reduced where they are taken."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._buckets.axes import AxisName, find_axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._run.driver import run
from dynamiq_jax._run.sample import key_of
from dynamiq_jax._worker_loss.casts import Cast
from dynamiq_jax._worker_loss.fingerprint import salt_of_call
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology
from pallas_kernels._jax import compat

Tree = TypeVar("Tree")


def pcast(
    tree: Tree,
    axis_name: AxisName,
    *,
    to: str,
    key: Array | None = None,
    mean: bool = False,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    specs: Any = None,
    options: Options = Options(),
) -> Tree:
    """Cast replicated parameters to varying ones, whose gradients are summed compressed.

    Like `jax.lax.pcast(tree, axis_name, to="varying")`, an identity whose transpose is a sum over
    the axis. Here the sum is `dq.psum`. So the gradient of a function of the parameters is reduced
    already, inside a `jax.lax.scan` over layers layer by layer.
    Nothing is sent for leaves that are not differentiated, such as frozen ones.

        def loss(params, batch):
            params = dq.pcast(params, "data", to="varying")
            return jax.lax.pmean(loss_fn(params, batch), "data")

    Use it inside `jax.shard_map`. With `check_vma=True`, the gradient of a mean over the axis, as
    above, is the mean of the gradients. With `check_vma=False`, JAX transposes `lax.pmean` to a
    sum: differentiate the local loss, and give `mean=True`.

    Args:
      tree: pytree of parameters, the same on all workers. Only floating leaves have gradients.
      axis_name: one axis, or several with the slowest link first; see `psum`.
      to: "varying", the type of the result, as for `jax.lax.pcast`.
      key: PRNG key, the same on all workers, a different key at every step. By default it is
        computed from a sample of the tree, one coordinate of 251 and all of small leaves, which is
        the same on all workers, and from the number of the cast among the casts of one trace. So
        the key repeats where gradients are taken again at the same parameters: for each part of a
        batch, and at a learning rate of 0. Give a key there, such as `jax.random.key(step)`.
      mean: whether the sum is divided by the number of workers.
      method: compression method or policy, without state; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: split of the parameters over axes that the compiler manages; see `psum`.
      options: leaves whose gradients stay exact, and the size of buckets.

    Returns:
      The same values.

    Raises:
      ValueError: as `psum`; another `to`; parameters that vary over the axis.
    """
    if to != "varying":
        raise ValueError(f"to={to!r} is not supported. Give to='varying', or use jax.lax.pcast.")
    compression = resolve(method, topology, options, stateless="pcast")
    collective = AllReduce(find_axes(axis_name), mean=mean)
    names = collective.axes.names
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        varying = sorted(compat.varying_axes(leaf) & set(names))
        if varying:
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} varies over axis {varying[0]!r} already. Give "
                "parameters that are the same on all workers, which shard_map takes with "
                "in_specs=P()."
            )

    def summed(cotangents: Tree, key: Array) -> Tree:
        return run(collective, cotangents, key, compression, specs=specs).tree

    cast = Cast(
        spread=lambda tree: compat.vary_over(tree, names),
        sum=summed,
        key_of=lambda tree: key_of(tree, specs),
    )
    salt = None if key is not None else jnp.uint32(salt_of_call("pcast"))
    return cast(tree, key, salt)[0]
