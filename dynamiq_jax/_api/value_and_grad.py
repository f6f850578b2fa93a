"""Data-parallel gradients without a `shard_map` of one's own."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.sharding import Mesh

from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._worker_loss import wrapped
from dynamiq_jax._worker_loss.gradients import value_and_gradients
from dynamiq_jax._worker_loss.loss_call import plan_call
from dynamiq_jax._worker_loss.roles import Roles, parameters_of
from dynamiq_jax._worker_loss.transforms import Transform
from dynamiq_jax._worker_loss.worker_loss import WorkerLoss
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology


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
    of arguments to entries, for keyword arguments too. An entry is a tree of `PartitionSpec`s like
    the argument, or a prefix of the tree:

        in_specs=(None, {"x": P("data"), "class_weights": P()})
        in_specs={"class_weights": P()}

    Gradients of an nnx module are the `nnx.State` of its `nnx.Param`s, as `nnx.value_and_grad`
    returns them. A call updates the state of the module: counters of random streams go on,
    statistics are averaged, and other integers become the largest of all workers. Each worker has
    dropout of its own.

    The result is the mean of the workers' means. If workers have different numbers of targets
    (padding, masks), this is not the mean over all targets. Then give `num_targets`. If rows are
    compared with each other, give `split`. `check_data_parallel` compares the result with the loss
    of the whole batch. A backward pass that is not linear, such as one that clips, gets cotangents
    that are n times those of the whole batch; with `data_parallel`, it gets those of one device.

    The result is compiled, as by `jax.jit`. Make it once, before the loop. A value that `loss_fn`
    reads besides its arguments is a constant of the first call with their shapes.

    Args:
      loss_fn: `loss_fn(params, *batch)` to a scalar, or to `(scalar, aux)` with `has_aux`.
      argnums: position or positions to differentiate.
      mesh: mesh with the axis.
      axis_name: axis of the mesh to split over, or several with the slowest link first; see `psum`.
      method: compression method or policy, without state; see `psum`.
      topology: route of the chunks; see `psum`.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Each worker has its own aux, a pytree of
        arrays.
      aux: roles by which one aux is made from the aux of all workers, exactly: one role for all of
        it, a tree of roles like aux, or a prefix of the tree. `"mean"` is weighted by
        `num_targets`. `"sum"` is for sums and counts, and is not weighted. `"rows"` is for arrays
        with a row for each example; the result has the rows of all workers. `"same"` is for equal
        values on all workers. Arrays without a role are an error: a scalar does not show whether it
        is a mean or a sum.
      num_targets: function of the arguments of `loss_fn`, by position where it has one, to the
        number of targets that its mean is over, a scalar. Losses, gradients and means in aux are
        weighted by this number. A worker without targets is ignored, also if its loss is NaN. If no
        worker has targets, all of them count, with a weight of zero.
      in_specs: specs of arrays over the workers. `P("data")` splits the leading axis,
        `P(None, "data")` the second axis, and `P()` gives the whole array to every worker. Arrays
        with None, and arguments without an entry, are split along their leading axes, which have
        one size. Numbers and scalars are whole with any spec. Differentiated arguments, modules and
        static arguments have None or `P()`.
      split: rule that gives rows to workers, for rows that belong together: `"blocks:2"` if the
        batch stacks two blocks whose rows are compared, `"groups:8"` if eight neighbors are
        compared, or a function of the numbers of rows and of workers to an int array
        [workers, rows // workers] of rows. A dict from names or positions of arguments to rules, or
        to trees of rules, is for these arguments alone. By default each worker gets neighbors.
      static_argnums: positions of arguments that are compile-time constants, as for `jax.jit`.
      static_argnames: names of such keyword arguments.
      specs: split of the differentiated argument over other axes of the mesh; see `psum`. For
        several positions, a tuple with the specs of each. By default, specs are the placement of
        the arguments of a call, or are part of their types. Inside `jax.jit` both are unknown: give
        specs there, if the mesh has further axes.
      options: gradients that stay exact, the size of buckets, and a limit of the error.
      with_metrics: return `(loss, grads, metrics)`, with the metrics of `psum`.
      transform: the transformation of JAX that runs the loss for every worker. "shard_map" makes
        the workers' axis manual, so that the compiler can send nothing else over it, and the loss
        may call collectives over it. "vmap" leaves all axes to the compiler. The loss may then hold
        sharding constraints and a `jax.shard_map` over other axes of the mesh, as kernels of
        attention do. The loss must then not name the workers' axis, and a `jax.lax.cond` that
        depends on the batch computes both branches.
      check_vma: argument of `jax.shard_map`, False by default. Gradients are the same. Under True,
        JAX refuses a loop or a `cond` of the loss in which a constant stands for an array, as the
        first state of an RNN, and JAX 0.12 cannot differentiate `erf`, as in exact GELU.

    Returns:
      A function of the arguments of `loss_fn` and `key`, a PRNG key for the noise of rounding, that
      returns `(loss, grads)` or `((loss, aux), grads)`: the loss averaged exactly, the gradients
      averaged compressed, all the same on all workers but for rows of aux, which are split over
      them. Arrays that are not floating have gradients of dtype float0. Leaves that are no arrays,
      such as functions and strings, have None. An argument `key` of `loss_fn`, as for dropout, is
      given by position.

    Raises:
      ValueError: the mesh has no such axis; the method carries state; `aux` holds no role; another
        `transform`, or `check_vma` beside "vmap"; `loss_fn` has a keyword-only argument `key`; or
        when called, an argument `key` of `loss_fn` is not given by position, arrays without a spec
        have leading axes of different sizes, an axis does not divide by the number of workers or
        would cut blocks or groups, specs or roles do not fit, arrays of aux have no role, an
        argument is missing, the loss names axes that `transform` does not allow, or its backward
        pass returns the next state of a leaf in place of a gradient, as for FP8 layers.
      TypeError: `argnums` holds no position; `in_specs` is neither a tuple nor a dict, or holds
        something that is no spec; or `split` something that is no rule.
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
        compression=resolve(
            method, topology, options, stateless="value_and_grad", measures=with_metrics
        ),
        transform=transform,
        check_vma=check_vma,
    )
    own_key = _place_of_key(loss_fn)

    def value_and_grad_fn(*args: Any, key: Array, **kwargs: Any) -> Any:
        if own_key is not None and len(args) <= own_key:
            raise ValueError(
                "key= is for the noise of rounding, and loss_fn has an argument 'key' too, which "
                f"was not given. Give that one by position, as argument {own_key}, None included."
            )
        call = plan_call(work, args, kwargs)
        value, grads, metrics = value_and_gradients(call, key)
        return (value, grads, metrics) if with_metrics else (value, grads)

    wrapped.register(value_and_grad_fn, work)
    return value_and_grad_fn


def _place_of_key(loss_fn: Callable[..., Any]) -> int | None:
    """Return the position of an argument `key` of a loss function, or None.

    Raises:
      ValueError: it has no position.
    """
    parameters = parameters_of(loss_fn)
    own = parameters.get("key")
    if own is None or own.kind is own.POSITIONAL_ONLY:
        return None
    if own.kind is not own.POSITIONAL_OR_KEYWORD:
        raise ValueError(
            f"loss_fn={loss_fn!r:.80} has a keyword-only argument 'key', but key= is for the noise "
            "of rounding. Rename it, such as dropout_key."
        )
    return list(parameters).index("key")
