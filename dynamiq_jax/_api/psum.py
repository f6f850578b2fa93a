"""Compressed sums and means of whole pytrees."""

from typing import Any, TypeVar

from jax import Array

from dynamiq_jax._buckets.axes import AxisName, find_axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._run.driver import Outcome, run
from dynamiq_jax._run.unreduced import is_unreduced, reduce_unreduced

Tree = TypeVar("Tree")


def psum(
    tree: Tree,
    axis_name: AxisName,
    method: Choice = Compression(),
    *,
    key: Array | None = None,
    with_metrics: bool = False,
) -> Any:
    """Sum a pytree over a mesh axis, with floating-point leaves compressed on the wire.

    Like `jax.lax.psum`. Use it inside `jax.shard_map`, with `check_vma` True or False, or inside
    `jax.vmap(..., axis_name=...)`, which simulates workers on one device. All workers get the same
    bits. Outside of a map, on explicit axes, `psum` takes arrays whose types are unreduced over the
    axis, such as gradients of parameters that are `P(reduced={axis_name})`, as `jax.reshard` does.

    Args:
      tree: pytree of arrays. Floating leaves (f16, bf16, f32; f8 and f64 through f32) of at least
        `exact_below` elements are compressed; other leaves are summed exactly. A boolean
        leaf is True where any worker has True.
      axis_name: one axis, or several with the slowest link first: `("hosts", "local")` sums exactly
        over `local`, a part on each worker, compresses over `hosts`, and gathers exactly.
      method: how to compress: a method, a name, a policy, or a `dq.Compression`.
      key: PRNG key of the rounding noise, the same on all workers, another one in each step. The
        same key gives the same bits. None: it follows from a sample of the leaves of all workers,
        which adds four bytes. Leaves whose samples repeat repeat their noise.
      with_metrics: return metrics beside the tree. They take 1% of the bytes, for the exact sum of
        a sample of the compressed coordinates.

    Returns:
      A tree of the same structure, shapes and dtypes; with metrics, `(tree, metrics)`. NaN and Inf
      of any worker surface at least at their own coordinate, on all workers; with DynamiQ, in the
      256 coordinates of their super-group, as NaN.

      Metrics are float32 scalars, the same on all workers, of the compressed leaves: `error`, the
      estimated vNMSE; `worst_error`, the largest of a bucket, and `worst_bucket`, its number;
      `norm` of the exact result; `non_finite`, the share of the rows of 256 that hold NaN or Inf;
      `bytes` that each worker has sent over the slow axis, exact leaves included; `fallbacks`, the
      buckets that were sent again because of `max_error`; and the metrics of the method.

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
    request = resolve(method, stateless="psum", measures=with_metrics)

    def reduce(tree: Tree) -> Any:
        collective = AllReduce(find_axes(axis_name))
        return _result(run(collective, tree, key, request), with_metrics)

    return reduce_unreduced(reduce, tree, axis_name) if is_unreduced(tree) else reduce(tree)


def pmean(
    tree: Tree,
    axis_name: AxisName,
    method: Choice = Compression(),
    *,
    key: Array | None = None,
    with_metrics: bool = False,
) -> Any:
    """Average a pytree over a mesh axis, with floating-point leaves compressed on the wire.

    Like `jax.lax.pmean`, and a `psum` divided by the size of the axis: in float32, before it is
    cast to each leaf's dtype. Dtypes are kept. The mean of an integer leaf is floored, and a
    boolean leaf is True where any worker has True.

    Args:
      tree: pytree of arrays; floating leaves of at least `exact_below` elements are
        compressed.
      axis_name: one axis, or several with the slowest link first; see `psum`.
      method: how to compress, without state; see `psum`.
      key: PRNG key, the same on all workers, or None; see `psum`.
      with_metrics: return metrics beside the tree; see `psum`.

    Returns:
      A tree of the same structure, shapes and dtypes; with metrics, `(tree, metrics)`; see `psum`.

    Raises:
      ValueError: as `psum`; unreduced leaves, which are terms of a sum.
      TypeError: as `psum`.
    """
    request = resolve(method, stateless="pmean", measures=with_metrics)
    if is_unreduced(tree):
        raise ValueError(
            f"The leaves are unreduced over axis_name={axis_name!r}: each device holds its term of "
            "a sum. Use dq.psum. The sum is the gradient of a loss that is a mean over the batch."
        )
    collective = AllReduce(find_axes(axis_name), mean=True)
    return _result(run(collective, tree, key, request), with_metrics)


def _result(outcome: Outcome, with_metrics: bool) -> Any:
    return (outcome.tree, dict(outcome.metrics)) if with_metrics else outcome.tree
