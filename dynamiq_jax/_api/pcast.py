"""The compressed sum as the transpose of a cast: gradients are reduced where they are taken."""

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero

from dynamiq_jax._buckets import driver
from dynamiq_jax._buckets.axes import AxisName, find_axes
from dynamiq_jax._buckets.fingerprint import key_of
from dynamiq_jax._buckets.operations import AllReduce
from dynamiq_jax._inputs.options import Compression, Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology
from pallas_kernels import compat

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
    the axis. Here that sum is `dq.psum`. So whoever differentiates a function of the parameters
    gets gradients that are reduced already, inside a `jax.lax.scan` over layers layer by layer.
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
      to: "varying".
      key: PRNG key, the same on all workers, another one at every step. By default it is computed
        from all bits of the leaves that are differentiated, which are the same on all workers and
        which every step changes. Give one where gradients are taken several times at the same
        parameters.
      mean: divide the sum by the number of workers.
      method: compression method without state; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: how parameters are split over axes that the compiler manages; see `psum`.
      options: leaves whose gradients stay exact, and the size of buckets.

    Returns:
      The same values.

    Raises:
      ValueError: another `to`; parameters that vary over the axis; and as `psum`.
    """
    if to != "varying":
        raise ValueError(f"to={to!r} is not supported. Give to='varying', or use jax.lax.pcast.")
    compression = resolve(method, topology, options, stateless="pcast")
    operation = AllReduce(find_axes(axis_name), mean=mean)
    names = operation.axes.names
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        varying = sorted(compat.varying_axes(leaf) & set(names))
        if varying:
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} varies over axis {varying[0]!r} already. Give "
                "parameters that are the same on all workers, which shard_map takes with "
                "in_specs=P()."
            )
    return cast_to_sum(operation, tree, key, None, compression, specs)


def cast_to_sum(
    operation: AllReduce,
    tree: Tree,
    key: Array | None,
    salt: Array | None,
    compression: Compression,
    specs: Any,
) -> Tree:
    """Return a tree of the same values, varying, whose transpose is an all-reduce.

    Only leaves that are differentiated are sent.

    Args:
      operation: the all-reduce.
      tree: pytree of arrays.
      key: PRNG key; None for one from all bits of the leaves that are differentiated.
      salt: number that such a key depends on as well, uint32 scalar, or None.
      compression: method, topology and options.
      specs: how the leaves are split over axes that are not manual here; see `find_shards`.
    """

    @jax.custom_vjp
    def cast(tree: Tree, key: Array | None, salt: Array | None) -> Tree:
        del key, salt
        return compat.vary_over(tree, operation.axes.names)

    def forward(tree: Any, key: Any, salt: Any) -> tuple[Tree, tuple[_Differentiated, Array]]:
        primals, structure = jax.tree.flatten(tree)
        differentiated = _Differentiated(tuple(primal.perturbed for primal in primals))
        values = jax.tree.unflatten(structure, [primal.value for primal in primals])
        if key is None:
            step_key = key_of(differentiated.only(values), specs)
            step_key = step_key if salt is None else jax.random.fold_in(step_key, salt.value)
        else:
            step_key = key.value
        return compat.vary_over(values, operation.axes.names), (differentiated, step_key)

    def backward(
        residuals: tuple[_Differentiated, Array], cotangents: Any
    ) -> tuple[Tree, None, None]:
        differentiated, key = residuals
        sent = driver.run(
            operation, differentiated.only(cotangents), key, compression, specs=specs
        ).tree
        return jax.tree.map(_none_if_float0, sent), None, None

    cast.defvjp(forward, backward, symbolic_zeros=True)
    return cast(tree, key, salt)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Differentiated:
    """Flags of the leaves of a tree that are differentiated."""

    flags: tuple[bool, ...]

    def only(self, tree: Any) -> Any:
        """Return a tree in which other leaves, and symbolic zeros, have dtype float0."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_zero)
        kept = [
            leaf if flag and not _is_zero(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            for leaf, flag in zip(leaves, self.flags, strict=True)
        ]
        return jax.tree.unflatten(structure, kept)


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


def _none_if_float0(leaf: Any) -> Any:
    return None if leaf.dtype == jax.dtypes.float0 else leaf
