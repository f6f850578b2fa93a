"""Compressed sums of whole pytrees, of which each worker gets its own part."""

from typing import Any, TypeVar

from jax import Array

from dynamiq_jax._buckets.axes import find_axis
from dynamiq_jax._collectives.reduce_scatter import ReduceScatter
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._run.driver import run
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology

Tree = TypeVar("Tree")


def psum_scatter(
    tree: Tree,
    axis_name: str,
    *,
    key: Array | None = None,
    scatter_dimension: int = 0,
    tiled: bool = False,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    specs: Any = None,
    options: Options = Options(),
) -> Tree:
    """Sum a pytree over a mesh axis, each worker its own part, compressed on the wire.

    Like `jax.lax.psum_scatter`. Only messages are compressed, and sums are not: `psum` has one
    compression more. The parts of all workers take equal bytes, so that the error is
    larger than the error of `psum` if some parts of the tree have much larger values than others.

    Args:
      tree: pytree of arrays; floating leaves of at least `options.exact_below` elements are
        compressed.
      axis_name: one axis; not several.
      key: PRNG key, the same on all workers, or None; see `psum`.
      scatter_dimension: dimension of every leaf that is scattered: of the size of the axis, or
        divided by it if tiled.
      tiled: True to keep this dimension, divided by the size of the axis; False to remove it.
      method: compression method or policy; see `psum`.
      topology: route of the chunks; see `psum`.
      specs: split of the leaves over other axes; see `psum`. Specs may not split the dimension
        that is scattered.
      options: leaves that stay exact, and the size of buckets.

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
    compression = resolve(method, topology, options)
    collective = ReduceScatter(find_axis(axis_name), scatter_dimension, tiled)
    return run(collective, tree, key, compression, specs=specs).tree
