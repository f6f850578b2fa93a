"""Train steps that others wrote, with their sums over an axis compressed."""

from collections.abc import Callable
from typing import Any

from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._rewriting.compressed_step import CompressedStep
from dynamiq_jax._rewriting.sums import DEFAULT_OPERATIONS, Operation, Selection, Sum


def compress(
    fun: Callable[..., Any],
    axis_name: AxisName,
    method: Choice = Compression(),
    *,
    key: Callable[..., Array] | None = None,
    only: Callable[[Sum], bool] | None = None,
    operations: tuple[Operation, ...] = DEFAULT_OPERATIONS,
    in_specs: Any = None,
    missing_ok: bool = False,
    with_metrics: bool = False,
) -> CompressedStep:
    """Compress the sums over a mesh axis in a train step, which stays as it is.

        step = dq.compress(step, "data")

    The step is traced. In a global step, under `jax.jit` with shardings, each equation that
    contracts rows of the batch is a sum over the axis that splits these rows. In the step of a
    worker, each `psum`, `pmean` and `psum_scatter` is one, wherever it is: in `shard_map` or
    `pmap`, with `check_vma` True or False, in `jit`, `scan`, `while_loop`, `cond` and `checkpoint`.
    So are the sums that `jax.grad` adds for parameters that are the same on all workers. Sums that
    do not need each other are one group, which is one compressed collective, as `dq.psum` of a
    tree.

    Floating sums of gradients with at least `exact_below` elements are compressed: of
    results of a backward pass, also in another form, rounded, clipped, masked, scaled by numbers or
    added. These stay exact: sums of anything else, such as statistics, products of gradients, and
    changes of parameters; sums with which a backward pass goes on; sums over groups of an axis; and
    sums over other axes alone. Zeros, as of frozen parameters, are not sent.

    Args:
      fun: train step, or any function that JAX can trace: plain, the result of `jax.jit`,
        `jax.pmap`, `jax.shard_map`, `nnx.jit` or `eqx.filter_jit`, a method, or an object that is
        called. Objects of flax.nnx among its arguments are updated in place.
      axis_name: one axis, or several with the slowest link first; see `psum`. A sum over more axes
        is exact over the others first.
      method: how to compress; see `psum`. The paths of leaves are "sum_0", "sum_1" and so on. Its
        specs say how the terms are split over axes that the compiler manages inside the map: a
        `PartitionSpec` for all, or a function of a `dq.Sum`. None: those of the parameters that
        the sums update, where their shardings are known.
      key: function of the arguments of the step that returns a PRNG key, the same on all workers
        and a different one at every step. None: the key of each sum follows from a sample of its
        terms on all workers, one coordinate of 251 and all of small ones, for which they add four
        bytes. A step whose sample repeats itself, as with a learning rate of 0, repeats its
        rounding noise then. Each of the first buckets in order has a sample of its own, and waits
        for no other gradient.
      only: function of a `dq.Sum` to whether it may be compressed, in place of the rule for
        gradients: the default is `lambda s: s.origin == "gradient"`, and gathers of anything.
      operations: functions of `jax.lax` that are replaced: add "all_gather" to compress gathers.
      in_specs: how the positional arguments are split, as in `jax.shard_map`: a `NamedSharding` for
        each, or for several, or a `PartitionSpec` if the mesh is known, as under `jax.set_mesh`.
        None: as their shardings say. It is needed where these are not known, as inside of another
        `jax.jit`.
      missing_ok: True: a step without a sum to compress stays as it is, in place of an error. So
        all maps of a program can be wrapped, such as by a function in place of `jax.pmap`. `report`
        still lists the sums of each.
      with_metrics: return `(results, metrics)`, with the metrics of `psum` for each group, in a
        list. It needs groups outside of maps and loops, as in a global step.

    Returns:
      A function with the arguments and results of `fun`. If `fun` is the result of `jax.jit`, so is
      this one, with the same donated and static arguments and shardings. Otherwise it is compiled
      when it is called outside of a trace: Python floats are arrays, and other arguments that are
      no arrays are constants, as is what it reads from its object. Its method `report` lists all
      sums of the step, and `lower`, `trace` and `eval_shape` are those of `jax.jit`; `lower` and
      `trace` of a step that is not jitted give a program of the arrays among its arguments.

    Raises:
      TypeError: `fun` or an argument is of the wrong kind; the step assigns arrays to its object.
      ValueError: when it is called: no sum can be compressed, unless `missing_ok`; the step lacks
        one axis of several; a sum is in an equation that cannot be made anew; a method that carries
        state; `with_metrics` of a group that is inside of another equation; and as `psum`.

    >>> import jax, jax.numpy as jnp
    >>> def step(weights, batch):
    ...     gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    ...     return weights - 0.1 * jax.lax.pmean(gradient, "data")
    >>> step = compress(step, "data")
    >>> weights, batches = jnp.ones((64, 64)), jnp.ones((2, 8, 64))
    >>> mapped = jax.vmap(step, in_axes=(None, 0), axis_name="data")
    >>> jax.jit(mapped)(weights, batches).shape
    (2, 64, 64)
    """
    if not callable(fun):
        raise TypeError(f"fun={fun!r:.80} cannot be called. Give a train step.")
    if key is not None and not callable(key):
        raise TypeError(
            f"key={key!r:.80} cannot be called. Give a function of the arguments of the step, such "
            "as lambda state, batch: jax.random.fold_in(jax.random.key(0), state.step), or None."
        )
    request = resolve(method, stateless="compress", measures=with_metrics)
    specs = request.compression.specs
    if not (specs is None or callable(specs) or isinstance(specs, PartitionSpec | NamedSharding)):
        raise TypeError(
            f"specs={specs!r:.200} is a tree, and the sums of a step are none. Give a "
            "PartitionSpec for all of them, or a function of a dq.Sum to its PartitionSpec."
        )
    selection = Selection(axis_name, request.compression.exact_below, only, operations)
    return CompressedStep(
        fun, selection, request, key=key, in_specs=in_specs, missing_ok=missing_ok
    )
