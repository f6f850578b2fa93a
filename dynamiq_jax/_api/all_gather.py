"""Compressed gathers of whole pytrees, whose transpose is compressed too."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.axes import find_axes
from dynamiq_jax._collectives.halves import AllGather, ReduceScatter
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._inputs.shards import leaf_specs
from dynamiq_jax._run.driver import run
from pallas_kernels._jax import compat

Tree = TypeVar("Tree")


def all_gather(
    tree: Tree,
    axis_name: str,
    method: Choice = Compression(),
    *,
    key: Array | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Tree:
    """Gather a pytree over a mesh axis, with floating-point leaves compressed on the wire.

    Like `jax.lax.all_gather`, and the second half of an all-reduce: an `all_gather` after a
    `psum_scatter` is a sum with one more compression. All workers have the same bits, the owner of
    a part included. DynamiQ rounds to nearest here, unless its field `rounding` is set.

    The transpose is `psum_scatter`, compressed as well. So parameters that
    are split over workers are gathered for a loss, and their gradients are split alike.

    Args:
      tree: pytree of arrays; floating leaves of at least `exact_below` elements, once
        gathered, are compressed.
      axis_name: one axis; not several.
      method: how to compress; see `psum`. Sizes are those of gathered leaves, and the topology is
        that of the transpose. With `tiled`, specs may not split the dimension that is gathered.
      key: PRNG key, the same on all workers, or None; see `psum`. The key of the `psum_scatter`
        before may be used again.
      axis: dimension of the result along which the parts lie; a negative one counts from the end.
      tiled: True to join the parts along this dimension; False to stack them along a new one.
      to: "varying" or "invarying", the type of the result under `check_vma=True`. Only a varying
        result has a compressed transpose: JAX sums the gradient of an invarying result before its
        transpose. Only an invarying result leaves `shard_map` with `out_specs=P()`.

    Returns:
      A tree of the same structure and dtypes with all of every leaf.

    Raises:
      ValueError: as `psum`; no such dimension; an invarying result that is differentiated.

    >>> import jax, jax.numpy as jnp
    >>> parts = jax.random.normal(jax.random.key(0), (2, 256, 64))
    >>> gather = lambda x: all_gather(x, "data", tiled=True)
    >>> jax.jit(jax.vmap(gather, axis_name="data"))(parts).shape
    (2, 512, 64)
    """
    if to not in ("varying", "invarying"):
        raise ValueError(f"to={to!r} is not supported. Give 'varying' or 'invarying'.")
    request = resolve(method)
    collective = AllGather(find_axes(axis_name, single=True), axis, tiled)
    names = collective.axes.names
    tracked = all(map(compat.tracks_varying, names))
    whole_specs = None
    if request.compression.specs is not None:
        leaves, structure = jax.tree.flatten(tree)
        specs = leaf_specs(tree, request.compression.specs)
        split = map(collective.result_spec, map(jnp.asarray, leaves), specs)
        whole_specs = jax.tree.unflatten(structure, split)

    # A trace of its own takes the token of the last collective, and returns the next token.
    @jax.custom_vjp
    def gather(tree: Tree, key: Array | None, token: Array | None) -> tuple[Tree, Array | None]:
        order.remember(token)
        whole = run(collective, tree, key, request).tree
        whole = compat.vary_over(whole, names) if to == "varying" else whole
        return whole, order.last_token()

    def forward(tree: Tree, key: Any, token: Any) -> tuple[tuple[Tree, Any], Any]:
        return gather(tree, key, token), key

    def backward(key: Any, cotangents: tuple[Tree, Any]) -> tuple[Tree, None, None]:
        if tracked and to == "invarying":
            raise ValueError(
                "to='invarying', but the result of dq.all_gather is differentiated: JAX has summed "
                "its gradient already, exactly and uncompressed. Give to='varying'."
            )
        scatter = ReduceScatter(collective.axes, axis, tiled)
        outcome = run(scatter, cotangents[0], key, request.with_specs(whole_specs))
        return outcome.tree, None, None

    gather.defvjp(forward, backward)
    whole, token = gather(tree, key, order.last_token())
    order.remember(token)
    return whole
