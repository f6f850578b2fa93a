"""Compressed sums and means of whole pytrees."""

from typing import Any, TypeVar

from jax import Array

from dynamiq_jax._buckets.axes import AxisName, find_axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._run.driver import Outcome, run
from dynamiq_jax._run.unreduced import is_unreduced, reduce_unreduced
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology

Tree = TypeVar("Tree")


def psum(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array | None = None,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    specs: Any = None,
    options: Options = Options(),
    with_metrics: bool = False,
) -> Any:
    """Sum a pytree over a mesh axis, with floating-point leaves compressed on the wire.

    Like `jax.lax.psum`. Use it inside `jax.shard_map`, with `check_vma` True or False, or inside
    `jax.vmap(..., axis_name=...)`, which simulates workers on one device. All workers get the same
    bits. Outside of a map, on explicit axes, `psum` takes arrays whose types are unreduced over the
    axis, such as gradients of parameters that are `P(reduced={axis_name})`, as `jax.reshard` does.

    Args:
      tree: pytree of arrays. Floating leaves (f16, bf16, f32; f8 and f64 through f32) of at least
        `options.exact_below` elements are compressed; other leaves are summed exactly. A boolean
        leaf is True where any worker has True.
      axis_name: one axis, or several with the slowest link first: `("hosts", "local")` sums exactly
        over `local`, a part on each worker, compresses over `hosts`, and gathers exactly.
      key: PRNG key of the rounding noise, the same on all workers, another one in each step. The
        same key gives the same bits. None: it follows from a sample of the leaves of all workers,
        which adds four bytes. Leaves whose samples repeat repeat their noise.
      method: compression method, or a name such as "dynamiq:5", "paper:4" or "qgz"; or a policy,
        which gives each leaf its own: patterns of paths, the first match counts, such as
        `{"embedding": "dynamiq:6", "norm|bias": "uncompressed", ".*": "dynamiq:5"}`, or a function
        of a path, such as "layers/0/kernel", and the leaf to a method. Leaves that
        are "uncompressed" are summed by `jax.lax.psum`. The method "exact" sends float32 along the
        topology, like any method.
      topology: route of the chunks, or a name such as "ring" or "all_to_all".
      specs: split of the leaves over the axes of the mesh that the compiler manages, so that each
        device compresses its own shards: a tree of `PartitionSpec` or `NamedSharding` like `tree`,
        or a prefix of it, such as the shardings of the parameters, or a function from the tree to
        specs. `P()` is for whole leaves on every device. Axes that are manual already or have one
        device do not count. Specs are needed only where the compiler manages an axis of several
        devices. Explicit axes are part of the types of leaves.
      options: leaves that stay exact, the size of buckets, and a limit of the error.
      with_metrics: return metrics beside the tree. They take 1% of the bytes, for the exact sum of
        a sample of the compressed coordinates.

    Returns:
      A tree of the same structure, shapes and dtypes; with metrics, `(tree, metrics)`. NaN and Inf
      of any worker surface at least at their own coordinate, on all workers; with DynamiQ, in the
      256 coordinates of their super-group, as NaN.

      Metrics are float32 scalars, the same on all workers, of the compressed leaves: `error`, the
      estimated vNMSE; `worst_error`, the largest of a bucket, and `worst_bucket`, its number;
      `sharing_gain`, the factor by which the error would fall if all buckets of DynamiQ shared
      their bits, and `idle_bucket`, the number of the bucket with the most bits to give; `norm` of
      the exact result; `non_finite`, the share of the rows of 256 that hold NaN or Inf; `bytes`
      that each worker has sent over the slow axis, exact leaves included; `fallbacks`, the buckets
      that were sent again because of `options.max_error`; and the metrics of the method.

    Raises:
      ValueError: unknown axis, method or topology; a policy with a leaf without a pattern, or a
        pattern without a leaf; a key that differs between workers; a leaf that is already summed
        over the axis, or is in a collection `_overwrite_with_gradient` of flax; a method that
        carries state; no specs beside an axis that the compiler manages, or specs that do not fit.
      TypeError: a key that is not a PRNG key; a leaf that is not an array.

    >>> import jax, jax.numpy as jnp
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 8192))
    >>> reduce = lambda g: psum(g, "data")
    >>> total = jax.jit(jax.vmap(reduce, axis_name="data"))(gradients)
    >>> total.shape, bool((total[0] == total[1]).all())
    ((2, 8192), True)
    """
    compression = resolve(method, topology, options, stateless="psum", measures=with_metrics)

    def reduce(tree: Tree) -> Any:
        collective = AllReduce(find_axes(axis_name))
        return _result(run(collective, tree, key, compression, specs=specs), with_metrics)

    return reduce_unreduced(reduce, tree, axis_name) if is_unreduced(tree) else reduce(tree)


def pmean(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array | None = None,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    specs: Any = None,
    options: Options = Options(),
    with_metrics: bool = False,
) -> Any:
    """Average a pytree over a mesh axis, with floating-point leaves compressed on the wire.

    Like `jax.lax.pmean`, and a `psum` divided by the size of the axis: in float32, before it is
    cast to each leaf's dtype. Dtypes are kept. The mean of an integer leaf is floored, and a
    boolean leaf is True where any worker has True.

    Args:
      tree: pytree of arrays; floating leaves of at least `options.exact_below` elements are
        compressed.
      axis_name: one axis, or several with the slowest link first; see `psum`.
      key: PRNG key, the same on all workers, or None; see `psum`.
      method: compression method or policy, without state; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: split of the leaves over axes that the compiler manages; see `psum`.
      options: leaves that stay exact, the size of buckets, and a limit of the error.
      with_metrics: return metrics beside the tree; see `psum`.

    Returns:
      A tree of the same structure, shapes and dtypes; with metrics, `(tree, metrics)`; see `psum`.

    Raises:
      ValueError: as `psum`; unreduced leaves, which are terms of a sum.
      TypeError: as `psum`.
    """
    compression = resolve(method, topology, options, stateless="pmean", measures=with_metrics)
    if is_unreduced(tree):
        raise ValueError(
            f"The leaves are unreduced over axis_name={axis_name!r}: each device holds its term of "
            "a sum. Use dq.psum. The sum is the gradient of a loss that is a mean over the batch."
        )
    collective = AllReduce(find_axes(axis_name), mean=True)
    return _result(run(collective, tree, key, compression, specs=specs), with_metrics)


def _result(outcome: Outcome, with_metrics: bool) -> Any:
    return (outcome.tree, dict(outcome.metrics)) if with_metrics else outcome.tree
