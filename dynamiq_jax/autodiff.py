"""`value_and_grad` for people who never wrote a shard_map."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from dynamiq_jax import buckets, collectives
from dynamiq_jax.axes import AxisName, axis_names
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Auto, Topology


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    axis_name: AxisName,
    method: Method | str = DynamiQ(),
    topology: Topology | Auto | str = "ring",
    has_aux: bool = False,
    replicated_argnums: int | Sequence[int] = (),
    mask: Any | Callable[[Any], Any] | None = None,
    exact_below: int = buckets.EXACT_BELOW,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, data-parallel over one axis of a mesh, with gradients averaged
    compressed.

        grad_fn = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data")
        loss, grads = grad_fn(params, batch, key=key)

    The first argument of `loss_fn` (flax linen parameters, an nnx state, any pytree of float
    arrays) is replicated and differentiated. The others are split along their leading axis, and
    `loss_fn` sees its worker's part; it should return a mean over it. Other axes of the mesh are
    left to the compiler.

    What is returned is the mean of the workers' means. Where workers have different numbers of
    targets (padding, masks), that is not the mean over all targets: return the sum over the
    worker's own times `workers / targets of all workers`, whose mean over the workers is. Inside
    `loss_fn`, `jax.lax.psum` counts them and `jax.lax.axis_size` gives the workers.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: how numbers become bytes.
      topology: how chunks travel.
      has_aux: whether `loss_fn` returns `(loss, aux)`; aux is a pytree of arrays, averaged exactly
        over the workers (metrics, not outputs per example).
      replicated_argnums: positions (from 1) of further arguments that every worker sees whole. A
        key for dropout is one; fold in `jax.lax.axis_index(axis_name)`, or all drop the same.
      mask: pytree of bools like the parameters (a prefix will do), or a function from their
        gradients to one: leaves marked False are averaged exactly.
      exact_below: leaves of fewer elements are averaged exactly.
      bucket_bytes: bytes of gradient that are compressed together; see `psum`.

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
    options = buckets.resolve_options(method, topology, exact_below, bucket_bytes)
    collectives.refuse_state(options.method, "value_and_grad")
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
        grads = collectives.pmean(grads, axis_name, key=key, mask=mask, **vars(options))
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
