"""A loss whose gradients are averaged compressed, for trainers that take a loss function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.sharding import Mesh

from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._worker_loss import wrapped
from dynamiq_jax._worker_loss.loss_call import plan_call
from dynamiq_jax._worker_loss.mean_loss import mean_loss
from dynamiq_jax._worker_loss.roles import Roles
from dynamiq_jax._worker_loss.transforms import Transform
from dynamiq_jax._worker_loss.worker_loss import WorkerLoss
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology


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

    For trainers that differentiate a loss function of the user inside one `jax.jit`, with
    `jax.grad` or `nnx.grad`. The gradient of the result is reduced already. Nothing else of the
    trainer changes.

        trainer = trainer.with_loss_fn(dq.data_parallel(loss_fn, mesh=mesh, axis_name="data"))

    Each worker computes `loss_fn` on its part of the batch, as in `value_and_grad`. Other axes of
    the mesh are left to the compiler. Nothing is sent for parameters that are not differentiated,
    such as those that adapters leave frozen, nor where the loss is computed alone.

    The result is compiled, as by `jax.jit`. So a value that `loss_fn` reads besides its arguments
    is a constant of the first call with their shapes. Make each value that changes an argument,
    such as a flag for evaluation.

    No key is needed. The noise of a call follows from its arguments, all bits of the batch and a
    sample of the parameters as in `pcast`, from the name of the loss function, and from the number
    of the call among the calls of one trace, which each `jax.grad` counts anew. So every step has
    its own noise, and so has each part of a step that accumulates gradients. Noise repeats where a
    program is run again with equal arguments, as at a learning rate of 0. To exclude repeated
    noise, give the loss a further argument that differs, such as the number of the step or a key:
    `loss_fn = lambda params, batch, step: ...`. The loss may ignore it.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      argnums: position or positions of the parameters.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: compression method or policy, without state; see `psum`.
      topology: route of the chunks; see `psum`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      aux: roles by which one aux is made from the aux of all workers: `"mean"`, `"sum"`, `"rows"`,
        `"same"`, or a tree of these; see `value_and_grad`.
      num_targets: function of the arguments of `loss_fn` to the number of targets of its mean. The
        loss is then the mean over the targets of all workers; see `value_and_grad`.
      in_specs: specs of arrays over the workers: a tuple with an entry for each positional
        argument, or a dict from names of arguments to entries; see `value_and_grad`. By default,
        all arrays are split along their leading axis, of one size.
      split: rule of rows that belong together: `"blocks:2"`, `"groups:8"` or a function; see
        `value_and_grad`.
      static_argnums: positions of arguments that are compile-time constants, as for `jax.jit`.
      static_argnames: names of such keyword arguments.
      specs: split of the parameters over other axes of the mesh; see `value_and_grad`. It may
        be a function of the parameters to their specs, such as `nnx.get_partition_spec`.
      options: gradients that stay exact, and the size of buckets.
      transform: "shard_map" or "vmap", the transformation of JAX that runs the loss for every
        worker; see `value_and_grad`.
      check_vma: argument of `jax.shard_map`; see `value_and_grad`.

    Returns:
      A function of the arguments of `loss_fn` to the mean of the workers' losses, or to
      `(loss, aux)`, the same on all workers but for rows of aux, which are split over them.

    Raises:
      ValueError: as `value_and_grad`.
      TypeError: as `value_and_grad`.
    """
    work = WorkerLoss(
        loss_fn=loss_fn,
        roles=Roles.of_arguments(
            loss_fn, argnums, in_specs, split, static_argnums, static_argnames
        ),
        has_aux=has_aux,
        aux=aux,
        num_targets=num_targets,
        mesh=mesh,
        axis_name=axis_name,
        specs=specs,
        compression=resolve(method, topology, options, stateless="data_parallel"),
        transform=transform,
        check_vma=check_vma,
    )

    @functools.wraps(loss_fn)  # its signature gives names to positions
    def mean_loss_fn(*args: Any, **kwargs: Any) -> Any:
        return mean_loss(plan_call(work, args, kwargs))

    wrapped.register(mean_loss_fn, work)
    return mean_loss_fn
