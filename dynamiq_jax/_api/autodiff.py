"""Data-parallel gradients without a `shard_map` of one's own."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from dynamiq_jax._api.collectives import pmean, refuse_state
from dynamiq_jax._buckets.axes import AxisName, axis_names
from dynamiq_jax._buckets.options import Options, resolve
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    axis_name: AxisName,
    method: Method | str = DynamiQ(),
    topology: Topology | str = "ring",
    has_aux: bool = False,
    replicated_argnums: int | Sequence[int] = (),
    options: Options = Options(),
) -> Callable[..., Any]:
    """Return a data-parallel `jax.value_and_grad` that averages gradients compressed.

        grad_fn = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data")
        loss, grads = grad_fn(params, batch, key=key)

    The first argument of `loss_fn` (flax linen parameters, an nnx state, any pytree of float
    arrays) is replicated and differentiated. The others are split along their leading axis.
    `loss_fn` gets the part of its worker and should return a mean over it. Other axes of the mesh
    are left to the compiler.

    The result is the mean of the workers' means. If workers have different numbers of targets
    (padding, masks), this is not the mean over all targets. Then return the sum over the worker's
    own targets times `workers / targets of all workers`. Inside `loss_fn`, `jax.lax.psum` counts
    targets and `jax.lax.axis_size` gives the number of workers.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: compression method; see `psum`.
      topology: route of the chunks; see `psum`.
      has_aux: whether `loss_fn` returns `(loss, aux)`; aux is a pytree of arrays, averaged exactly
        over the workers (metrics, not outputs per example).
      replicated_argnums: positions (from 1) of further arguments that every worker gets whole, such
        as a key for dropout. Fold `jax.lax.axis_index(axis_name)` into the key, or all workers drop
        the same.
      options: gradients that stay exact, and the size of buckets.

    Returns:
      A function of the arguments of `loss_fn` and `key`, a typed PRNG key, that returns `(loss,
      grads)` or `((loss, aux), grads)`: the loss averaged exactly, the gradients averaged
      compressed, all the same on all workers.

    Raises:
      ValueError: the mesh has no such axis; the method carries state; or when called, a leading
        axis does not divide by the axis size.
    """
    names = axis_names(axis_name)
    if not names or not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh. Give one of {mesh.axis_names}."
        )
    how = resolve(method, topology, options)
    refuse_state(how.method, "value_and_grad")
    num_workers = math.prod(mesh.shape[name] for name in names)
    whole = {replicated_argnums} if isinstance(replicated_argnums, int) else set(replicated_argnums)
    # The same mesh with axes that the compiler manages: shardings are its business here.
    automatic = Mesh(
        mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
    )
    replicated, split = PartitionSpec(), PartitionSpec(names)

    def local(key: Array, params: Any, *args: Any) -> Any:
        params = jax.tree.map(lambda leaf: lax.pcast(leaf, names, to="varying"), params)
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *args)
        value = jax.tree.map(lambda leaf: lax.pmean(leaf, names), value)
        grads = pmean(
            grads, axis_name, key=key, method=how.method, topology=how.topology, options=how.options
        )
        return value, grads

    @jax.jit
    def value_and_grad_fn(params: Any, *args: Any, key: Array) -> Any:
        unknown = [position for position in whole if not 1 <= position <= len(args)]
        if unknown:
            raise ValueError(
                f"replicated_argnums={replicated_argnums!r} names argument {unknown[0]}, but there "
                f"are {len(args)} after the parameters. Give positions from 1 to {len(args)}."
            )
        specs = []
        for position, arg in enumerate(args, start=1):
            is_replicated = position in whole
            specs.append(replicated if is_replicated else split)
            if not is_replicated:
                _check_divides(arg, position, num_workers, axis_name)
        # Under `jax.set_mesh` with JAX's default axis types, shardings are part of types instead.
        is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        mapped = jax.shard_map(
            local,
            mesh=None if is_explicit else automatic,
            in_specs=(replicated, replicated, *specs),
            out_specs=(replicated, replicated),
            axis_names=set(names),
        )
        if is_explicit:
            like_params = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, params)
            mapped = jax.sharding.auto_axes(mapped, out_sharding=(replicated, like_params))
        return mapped(key, params, *args)

    return value_and_grad_fn


def _check_divides(arg: Any, position: int, num_workers: int, axis_name: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] % num_workers:
            raise ValueError(
                f"Argument {position}{jax.tree_util.keystr(path)} has shape {shape}, whose leading "
                f"axis does not split over the {num_workers} workers of "
                f"axis {axis_name!r}. Pad or trim the batch, or list the position in "
                "replicated_argnums."
            )
