"""Compressed sums of whole pytrees, of which each worker gets its own part."""

from typing import TypeVar

from jax import Array

from dynamiq_jax._buckets.axes import find_axes
from dynamiq_jax._collectives.halves import ReduceScatter
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._run.driver import run

Tree = TypeVar("Tree")


def psum_scatter(
    tree: Tree,
    axis_name: str,
    method: Choice = Compression(),
    *,
    key: Array | None = None,
    scatter_dimension: int = 0,
    tiled: bool = False,
) -> Tree:
    """Sum a pytree over a mesh axis, each worker its own part, compressed on the wire.

    Like `jax.lax.psum_scatter`. Only messages are compressed, and sums are not: `psum` has one
    compression more. The parts of all workers take equal bytes, so that the error is
    larger than the error of `psum` if some parts of the tree have much larger values than others.

    Args:
      tree: pytree of arrays; floating leaves of at least `exact_below` elements are
        compressed.
      axis_name: one axis; not several.
      method: how to compress; see `psum`. Specs may not split the dimension that is scattered.
      key: PRNG key, the same on all workers, or None; see `psum`.
      scatter_dimension: dimension of every leaf that is scattered: of the size of the axis, or
        divided by it if tiled.
      tiled: True to keep this dimension, divided by the size of the axis; False to remove it.

    Returns:
      A tree of the same structure and dtypes with the worker's part of every leaf.

    Raises:
      ValueError: as `psum`; a dimension that does not divide.

    >>> import jax, jax.numpy as jnp
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 512, 64))
    >>> reduce = lambda g: psum_scatter(g, "data", tiled=True)
    >>> jax.jit(jax.vmap(reduce, axis_name="data"))(gradients).shape
    (2, 256, 64)
    """
    request = resolve(method)
    collective = ReduceScatter(find_axes(axis_name, single=True), scatter_dimension, tiled)
    return run(collective, tree, key, request).tree
