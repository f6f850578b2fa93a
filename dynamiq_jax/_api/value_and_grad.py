"""Data-parallel gradients without a `shard_map` of one's own."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    Roles,
    Signature,
    by_position,
    unwrap_single,
)
from dynamiq_jax._worker_loss.transforms import Transform
from dynamiq_jax._worker_loss.worker_loss import Specs, WorkerLoss, inexact_leaves
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology

P = PartitionSpec


def value_and_grad(
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
    with_metrics: bool = False,
    transform: Transform = "shard_map",
    check_vma: bool | None = None,
) -> Callable[..., Any]:
    """Return a data-parallel `jax.value_and_grad` that averages gradients compressed.

        grad_fn = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data")
        loss, grads = grad_fn(params, batch, key=key)

    Arguments in `argnums` (flax linen parameters, an nnx module or state, an equinox module, any
    pytree) are the same on all workers, and their floating and complex leaves are differentiated.
    They may be sharded over other axes of the mesh, which are left to the compiler: gradients are
    sharded alike, and every device sends its own shards. All other arrays are the batch, which is
    split along its leading axis. `loss_fn` gets the part of its worker and should return a mean
    over it. Numbers, scalars and PRNG keys are the same on all workers, and so are strings and
    other values that are not arrays.

    Arrays that are not part of the batch, such as weights of classes, need a spec. `in_specs` is a
    tuple with an entry for each positional argument, as for `jax.shard_map`, or a dict from names
    of arguments to entries, which covers keyword arguments too. An entry is a tree of
    `PartitionSpec`s like the argument, or a prefix of it:

        in_specs=(None, {"x": P("data"), "class_weights": P()})
        in_specs={"class_weights": P()}

    Gradients of an nnx module are the `nnx.State` of its `nnx.Param`s, as `nnx.value_and_grad`
    returns them. The module gets its state back: counters of random streams go on, statistics are
    averaged, and of other integers the largest is taken. Each worker has dropout of its own.

    The result is the mean of the workers' means. If workers have different numbers of targets
    (padding, masks), this is not the mean over all targets. Then give `num_targets`. If rows are
    compared with each other, give `split`. `check_data_parallel` finds whether the result is that
    of the whole batch.

    The result is compiled, as by `jax.jit`: make it once, before the loop. What `loss_fn` reads
    besides its arguments is a constant of the first call with their shapes.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      argnums: position or positions to differentiate.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: compression method; see `psum`.
      topology: route of the chunks; see `psum`.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Each worker has its own aux, a pytree of
        arrays.
      aux: how one aux is made of those of the workers, exactly: a role for all of it, or a tree of
        roles like it, or a prefix. `"mean"` is weighted by `num_targets`. `"sum"` is for sums and
        counts, and is not weighted. `"rows"` is for arrays with a row for each example, which come
        back as those of all workers. `"same"` is for values that do not differ. Arrays without a
        role are an error: a scalar does not show whether it is a mean or a sum.
      num_targets: function of the arguments of `loss_fn`, by position where it has one, to the
        number of targets that its mean is over, a scalar. Losses, gradients and means in aux are
        weighted by it. Those of a worker without targets are ignored, also if they are NaN, unless
        no worker has any.
      in_specs: how arrays are split over the workers. `P("data")` splits the leading axis,
        `P(None, "data")` the second one, and `P()` gives an array whole to every worker. None, and
        arguments without an entry, are split along their leading axis, which has to be as long in
        all of these arrays. Numbers and scalars are whole with any spec. Differentiated arguments
        have None or `P()`, and so have modules and static arguments.
      split: which rows go to which worker, where rows belong together: `"blocks:2"` if the batch
        stacks two blocks whose rows are compared, `"groups:8"` if eight neighbors are, or a
        function of the numbers of rows and of workers to an int array [workers, rows // workers] of
        rows. A dict from names or positions of arguments to such, or to trees of them, is for these
        arguments alone. By default each worker gets neighbors.
      static_argnums: positions of arguments that are compile-time constants, as for `jax.jit`.
      static_argnames: names of such keyword arguments.
      specs: how the differentiated argument is split over other axes of the mesh; see `psum`. For
        several positions, a tuple of such. By default as the arrays are placed that the result is
        called with, or as their types say. Inside `jax.jit` neither is known: give specs there, if
        the mesh has further axes.
      options: gradients that stay exact, the size of buckets, and a limit of the error.
      with_metrics: return `(loss, grads, metrics)`, with the metrics of `psum`.
      transform: "shard_map" or "vmap", which runs the loss for every worker; see `data_parallel`.
      check_vma: that of `jax.shard_map`; see `data_parallel`.

    Returns:
      A function of the arguments of `loss_fn` and `key`, a PRNG key, that returns `(loss, grads)`
      or `((loss, aux), grads)`: the loss averaged exactly, the gradients averaged compressed, all
      the same on all workers but for rows of aux, which are split over them. Leaves that are not
      floating have gradients of dtype float0, and those that are no arrays, such as functions and
      strings, None.

    Raises:
      ValueError: the mesh has no such axis; the method carries state; `aux` holds no role; another
        `transform`, or `check_vma` beside "vmap"; or when called, arrays without a spec have
        leading axes of different sizes, an axis does not divide by the number of workers or would
        cut blocks or groups, specs or roles do not fit, arrays of aux have no role, an argument is
        missing, or the loss names axes that `transform` does not allow.
      TypeError: `argnums` holds no position; `in_specs` is neither a tuple nor a dict, or holds
        something that is no spec; or `split` something that is no rule.
    """
    compression = resolve(
        method, topology, options, stateless="value_and_grad", measures=with_metrics
    )
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

    def value_and_grad_fn(*args: Any, key: Array, **kwargs: Any) -> Any:
        args, kwargs = by_position(loss_fn, args, kwargs)
        signature, placed, arrays = work.bind(args, kwargs)
        token = order.last_token()
        value, floating, rests, metrics, token = work.run(
            _run, signature, placed, arrays, key, token
        )
        order.remember(token)
        work.give_back(signature, args, kwargs, rests)
        trees = signature.differentiated(arrays)
        grads = roles.in_user_order(_like(trees, floating))
        return (value, grads, metrics) if with_metrics else (value, grads)

    wrapped.register(value_and_grad_fn, work)
    return value_and_grad_fn


def run_exactly(
    work: WorkerLoss, signature: Signature, specs: Specs, arrays: dict[str, list[Any]]
) -> tuple[Any, list[Array]]:
    """Return the value, and gradients of differentiated leaves, averaged exactly.

    Modules among the arguments are left as they are.
    """
    exact = dataclasses.replace(work, compression=resolve("exact", "ring", Options()))
    key = jax.random.key(0)
    value, floating, *_ = exact.run(_run, signature, specs, arrays, key, None)
    return value, floating


def _run(
    work: WorkerLoss,
    signature: Signature,
    specs: Specs,
    arrays: dict[str, list[Any]],
    key: Array,
    token: Array | None,
) -> tuple[Any, list[Array], list[Any], dict[str, Array], Array | None]:
    """Compute the value, gradients of differentiated leaves, the rest of modules, metrics, and a
    token of what was sent, which begins after a given one.
    """

    def local(
        arrays: Mapping[str, list[Any]],
    ) -> tuple[tuple[list[Array], list[Array]], tuple[Any, list[Any]]]:
        def loss_of(differentiated: list[Array]) -> tuple[Array, tuple[Any, list[Any]]]:
            return work.loss(signature, arrays, differentiated)

        (loss, (aux, rests)), grads = jax.value_and_grad(loss_of, has_aux=True)(
            arrays[DIFFERENTIATED]
        )
        rows, value = work.value(loss, aux)
        return (grads, rows), (value, rests)

    def run(
        arrays: dict[str, list[Any]], key: Array, token: Array | None
    ) -> tuple[Any, list[Array], list[Any], dict[str, Array], Array | None]:
        trees = signature.differentiated(arrays)
        replicas = work.replicas(trees, specs)
        stacked = inexact_leaves(replicas.stack(unwrap_single(trees)))
        (own, rows), (value, rests) = work.over_workers(
            local, signature, {**arrays, DIFFERENTIATED: stacked}
        )
        order.remember(order.token_of([token, *jax.tree.leaves((value, rests))]))
        each = unwrap_single(_like(trees, own, leading=(replicas.count,)))
        grads, metrics = replicas.all_reduce(each, key, mean=True)
        means = [leaf for leaf in jax.tree.leaves(grads) if leaf.dtype != jax.dtypes.float0]
        value = work.with_rows(value, rows, signature, arrays[SPLIT])
        return value, means, rests, metrics, order.last_token()

    placed = [jax.typeof(leaf).sharding.spec for leaf in arrays[DIFFERENTIATED]]
    out_sharding = (work.value_spec, placed, P(), P(), P())
    return automatic(run, out_sharding=out_sharding)(arrays, key, token)


def _like(
    trees: tuple[Any, ...], floating: Sequence[Array], leading: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    """Put gradients of floating leaves into trees; others are float0, with leading axes."""
    left = iter(floating)

    def gradient(leaf: Any) -> Any:
        is_floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        shape = (*leading, *np.shape(leaf))
        return next(left) if is_floating else np.zeros(shape, jax.dtypes.float0)

    return jax.tree.map(gradient, trees)
