"""A loss whose gradients are averaged compressed, for trainers that take a loss function."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._inputs.shards import automatic
from dynamiq_jax._worker_loss import wrapped
from dynamiq_jax._worker_loss.arguments import (
    DIFFERENTIATED,
    SPLIT,
    WHOLE,
    Roles,
    Signature,
    by_position,
    unwrap_single,
)
from dynamiq_jax._worker_loss.fingerprint import salt_of_call, word_of
from dynamiq_jax._worker_loss.transforms import Transform
from dynamiq_jax._worker_loss.worker_loss import Specs, WorkerLoss, inexact_leaves
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology
from pallas_kernels.codec.rounding import mix

P = PartitionSpec


def data_parallel(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mesh: Mesh,
    axis_name: AxisName,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    has_aux: bool = False,
    aux: Any = None,
    num_targets: Callable[..., Array] | None = None,
    in_specs: Any = None,
    split: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    specs: Any = None,
    options: Options = Options(),
    transform: Transform = "shard_map",
    check_vma: bool | None = None,
) -> Callable[..., Any]:
    """Return a loss function whose gradients are averaged compressed over workers.

    For trainers that differentiate a loss function that a user gives them, inside one `jax.jit`.
    Whoever differentiates the result, with `jax.grad` or `nnx.grad`, gets gradients that are
    reduced already. Nothing else of the trainer changes.

        trainer = trainer.with_loss_fn(dq.data_parallel(loss_fn, mesh=mesh, axis_name="data"))

    Each worker computes `loss_fn` on its part of the batch, as in `value_and_grad`. Other axes of
    the mesh are left to the compiler. Nothing is sent for parameters that are not differentiated,
    such as those that adapters leave frozen, nor where the loss is computed alone.

    The result is compiled, as by `jax.jit`. So what `loss_fn` reads besides its arguments is a
    constant of the first call with their shapes: pass what changes, such as a flag for evaluation.

    No key is needed. The noise of a call follows from all bits of its arguments, which are read
    once more for it, from the name of the loss function, and from the number of the call among
    those of one trace. So every step has its own noise, and so has each part of a step that
    accumulates gradients. Noise repeats where a program is run again with equal arguments, as at a
    learning rate of 0. To exclude that, give the loss a further argument that differs, such as
    the number of the step or a key: `loss_fn = lambda params, batch, step: ...`. The loss need not
    use it.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      argnums: position or positions of the parameters.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: compression method without state; see `psum`.
      topology: route of the chunks; see `psum`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      aux: what each part of aux is: `"mean"`, `"sum"`, `"rows"`, `"same"`, or a tree of these; see
        `value_and_grad`.
      num_targets: function of the arguments of `loss_fn`, by position where it has one, to the
        number of targets that its mean is over, a scalar. With it, the loss is the mean over the
        targets of all workers.
      in_specs: how arrays are split over the workers: a tuple with an entry for each positional
        argument, or a dict from names of arguments to entries; see `value_and_grad`. By default
        along the leading axis, which has to be as long in all arrays.
      split: which rows go to which worker, where rows belong together: `"blocks:2"`,
        `"groups:8"` or a function; see `value_and_grad`.
      static_argnums: positions of arguments that are compile-time constants, as for `jax.jit`.
      static_argnames: names of such keyword arguments.
      specs: how the parameters are split over other axes of the mesh; see `psum`. For several
        positions, a tuple of such. It may be a function of the parameters to their specs, such as
        `nnx.get_partition_spec`.
      options: gradients that stay exact, and the size of buckets.
      transform: the transformation of JAX that runs the loss for every worker. "shard_map" makes
        the workers' axis manual. The compiler can then send nothing else over it, which is why it
        is the default, and the loss may call collectives over it. "vmap" leaves all axes to the
        compiler. Then the loss may hold a `jax.shard_map` over other axes of the mesh, as kernels
        of attention do, and sharding constraints. It must not name the workers' axis, and a
        `jax.lax.cond` that depends on the batch computes both branches.
      check_vma: that of `jax.shard_map`. By default True where JAX can differentiate `erf`, as in
        exact GELU, with it: not in JAX 0.12. Gradients and bytes are the same.

    Returns:
      A function of the arguments of `loss_fn` to the mean of the workers' losses, or to
      `(loss, aux)`, the same on all workers but for rows of aux, which are split over them.

    Raises:
      ValueError: the mesh has no such axis; the method carries state; `aux` holds no role; another
        `transform`, or `check_vma` beside "vmap"; or when called, arrays without a spec have
        leading axes of different sizes, an axis does not divide by the number of workers or would
        cut blocks or groups, specs or roles do not fit, arrays of aux have no role, an argument is
        missing, or the loss names axes that `transform` does not allow.
      TypeError: `argnums` holds no position; `in_specs` is neither a tuple nor a dict, or holds
        something that is no spec; or `split` something that is no rule.
    """
    compression = resolve(method, topology, options, stateless="data_parallel")
    roles = Roles.of_arguments(loss_fn, argnums, in_specs, split, static_argnums, static_argnames)
    work = WorkerLoss(
        loss_fn=loss_fn,
        roles=roles,
        has_aux=has_aux,
        aux=aux,
        num_targets=num_targets,
        mesh=mesh,
        axis_name=axis_name,
        specs=specs,
        compression=compression,
        transform=transform,
        check_vma=check_vma,
    )

    @functools.wraps(loss_fn)  # its signature gives names to positions
    def mean_loss(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(loss_fn, args, kwargs)
        signature, placed, arrays = work.bind(args, kwargs)
        salt = jnp.uint32(salt_of_call(work.called(signature)))
        ticket = order.enter(arrays[DIFFERENTIATED])
        loss, ticket, others, rests = work.run(_run, signature, placed, arrays, salt, ticket)
        loss = order.leave(loss, ticket)
        work.give_back(signature, args, kwargs, rests)
        return (loss, *others) if has_aux else loss

    wrapped.register(mean_loss, work)
    return mean_loss


def _run(
    work: WorkerLoss,
    signature: Signature,
    specs: Specs,
    arrays: dict[str, list[Any]],
    salt: Array,
    ticket: Array,
) -> tuple[Array, Array, tuple[Any, ...], list[Any]]:
    """Compute the loss, a ticket for what is sent, aux if there is any, and the rest of modules."""

    def word(arrays: Mapping[str, list[Any]]) -> tuple[tuple[()], Array]:
        return (), word_of(arrays[SPLIT], work.names) ^ word_of(arrays[WHOLE], ())

    def local(arrays: Mapping[str, list[Any]]) -> tuple[list[Array], tuple[Any, list[Any]]]:
        loss, (aux, rests) = work.loss(signature, arrays, arrays[DIFFERENTIATED])
        rows, value = work.value(loss, aux)
        return rows, (value, rests)

    def run(
        arrays: dict[str, list[Any]], salt: Array, ticket: Array
    ) -> tuple[Array, Array, tuple[Any, ...], list[Any]]:
        trees = signature.differentiated(arrays)
        _, of_arrays = work.over_workers(word, signature, {**arrays, DIFFERENTIATED: []})
        stacked, passed = work.replicas(trees, specs).broadcast(
            unwrap_single(trees), None, mix(of_arrays) ^ salt, ticket, mean=False
        )
        assert passed is not None
        own = {**arrays, DIFFERENTIATED: inexact_leaves(stacked)}
        rows, (value, rests) = work.over_workers(local, signature, own)
        value = work.with_rows(value, rows, signature, arrays[SPLIT])
        loss, *others = value if work.has_aux else (value,)
        return loss, order.stamp(passed, [loss]), tuple(others), rests

    out_sharding = (P(), P(), work.aux_spec, P())
    return automatic(run, out_sharding=out_sharding)(arrays, salt, ticket)
