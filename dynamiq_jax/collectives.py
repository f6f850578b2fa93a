"""`psum` and `pmean` of whole pytrees, compressed."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import buckets, checks, compat
from dynamiq_jax.methods import DynamiQ, Method, resolve_method
from dynamiq_jax.methods.base import State
from dynamiq_jax.topologies import Topology, resolve_topology

Tree = TypeVar("Tree")


def psum(
    tree: Tree,
    axis_name: str,
    *,
    key: Array,
    method: Method | str = DynamiQ(),
    topology: Topology | str = "ring",
    exact_below: int = buckets.EXACT_BELOW,
) -> Tree:
    """Sum over an axis, like `jax.lax.psum`, with floating-point leaves compressed on the wire.

    Use it inside `jax.shard_map`, with `check_vma` True or False, or inside `jax.vmap(...,
    axis_name=...)`, which simulates workers on one device. All workers get the same bits.

    Args:
      tree: pytree of arrays. Floating leaves (f16, bf16, f32; f64 through f32) of at least
        `exact_below` elements are compressed; other leaves are summed exactly. Boolean leaves give
        whether any worker has True.
      axis_name: one axis, of any size.
      key: typed PRNG key, the same on all workers, another one at every step. The same key gives
        the same bits.
      method: how numbers become bytes: a method, or the name of one.
      topology: how chunks travel: a topology, or the name of one.
      exact_below: leaves of fewer elements are summed exactly.

    Returns:
      A tree of the same structure, shapes and dtypes. NaN and Inf of any worker surface at least at
      their own coordinate, on all workers; with DynamiQ, in the 256 coordinates of their
      super-group, as NaN.

    Raises:
      ValueError: unknown axis, method or topology; a key that differs between workers; a leaf that
        is already summed over the axis.
      TypeError: a key that is not a typed PRNG key; a leaf that is not an array.

    >>> import jax, jax.numpy as jnp
    >>> gradients = jax.random.normal(jax.random.key(0), (2, 8192))
    >>> reduce = lambda g: psum(g, "data", key=jax.random.key(1))
    >>> total = jax.jit(jax.vmap(reduce, axis_name="data"))(gradients)
    >>> total.shape, bool((total[0] == total[1]).all())
    ((2, 8192), True)
    """
    return _reduce(tree, axis_name, key, method, topology, exact_below, mean=False)


def pmean(
    tree: Tree,
    axis_name: str,
    *,
    key: Array,
    method: Method | str = DynamiQ(),
    topology: Topology | str = "ring",
    exact_below: int = buckets.EXACT_BELOW,
) -> Tree:
    """Mean over an axis, like `jax.lax.pmean`, with floating-point leaves compressed on the wire.

    As `psum`, divided by the size of the axis in float32 before the result is cast to each leaf's
    dtype. Dtypes are kept: the mean of an integer leaf is floored, and a boolean leaf gives whether
    any worker has True.
    """
    return _reduce(tree, axis_name, key, method, topology, exact_below, mean=True)


def _reduce(tree, axis_name, key, method, topology, exact_below, mean):
    method = resolve_method(method)
    if is_stateful(method):
        raise ValueError(
            f"method={method!r} carries state from step to step, which psum and pmean cannot keep. "
            "Use dq.all_reduce_gradients, whose optimizer state holds it."
        )
    result, _ = reduce_tree(
        tree,
        axis_name,
        key=key,
        method=method,
        topology=topology,
        exact_below=exact_below,
        mean=mean,
        states=None,
    )
    return result


def is_stateful(method: Method) -> bool:
    """Whether a method carries state from step to step."""
    return type(method).init_state is not Method.init_state


def init_states(
    tree: Any, axis_name: str, *, method: Method, topology: Topology, **options: Any
) -> tuple[State, ...]:
    """States of a method for every bucket of a tree, before the first step."""
    num_workers = checks.check_axis(axis_name)
    leaves = jax.tree.leaves(tree)
    kinds = _other_axes(leaves, axis_name)
    plan = buckets.plan(
        leaves, num_workers, method=method, topology=topology, kinds=kinds, **options
    )
    return tuple(method.init_state(bucket.size, num_workers) for bucket in plan.buckets)


def _other_axes(leaves: Sequence[Any], axis_name: str) -> list[frozenset[str]]:
    """Other axes that each leaf varies over. A leaf that is replicated over such an axis must not
    share a bucket, and so the order of its rows, with one that differs along it.
    """
    return [compat.varying_axes(leaf) - {axis_name} for leaf in leaves]


def reduce_tree(
    tree: Tree,
    axis_name: str,
    *,
    key: Array,
    method: Method | str,
    topology: Topology | str,
    exact_below: int = buckets.EXACT_BELOW,
    compress: Sequence[bool] | None = None,
    mean: bool,
    states: tuple[State, ...] | None,
) -> tuple[Tree, tuple[State, ...]]:
    """What `psum`, `pmean` and `all_reduce_gradients` share; see `psum`.

    Args beyond those of `psum`:
      compress: False for leaves, in flattened order, that are to be summed exactly.
      mean: divide by the size of the axis.
      states: the method's state for every bucket, None for those of a first step.

    Returns:
      The reduced tree and the next states.
    """
    method, topology = resolve_method(method), resolve_topology(topology)
    num_workers = checks.check_axis(axis_name)
    key = checks.check_key(key, axis_name)
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for path, leaf in paths_and_leaves:
        leaf = (
            jnp.asarray(leaf)
            if isinstance(leaf, bool | int | float | complex | np.number)
            else leaf
        )
        name = jax.tree_util.keystr(path)
        checks.check_leaf(name, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            checks.check_not_reduced(name, leaf, axis_name)
        leaves.append(leaf)
    plan = buckets.plan(
        leaves,
        num_workers,
        method=method,
        topology=topology,
        compress=compress,
        exact_below=exact_below,
        kinds=_other_axes(leaves, axis_name),
    )
    exact = {index: leaves[index] for index, _ in plan.exact}
    result = _reduce_exact(exact, axis_name, num_workers, mean)
    result |= {index: leaves[index] for index in plan.untouched}
    next_states = []
    for number, bucket in enumerate(plan.buckets):
        state = method.init_state(bucket.size, num_workers) if states is None else states[number]
        total, state = method.all_reduce(
            _refuse_gradient(buckets.flatten(bucket, leaves)).astype(_bucket_dtype(bucket.dtype)),
            axis_name,
            num_workers,
            topology=topology,
            key=jax.random.fold_in(key, number),
            state=state,
        )
        total = total * np.float32(1 / num_workers) if mean else total
        result |= buckets.unflatten(bucket, total, leaves)
        next_states.append(state)
    return jax.tree.unflatten(structure, [result[index] for index in range(len(leaves))]), tuple(
        next_states
    )


def _bucket_dtype(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if dtype == jnp.float64 else dtype


@jax.custom_vjp
def _refuse_gradient(flat: Array) -> Array:
    """Identity without a gradient: that of a rounded value is zero, which would pass unnoticed."""
    return flat


def _refuse(*_: Any) -> Any:
    raise ValueError(
        "dq.psum and dq.pmean cannot be differentiated: rounding has no useful gradient. Take the "
        "gradient first and reduce it afterwards, or differentiate through jax.lax.psum."
    )


_refuse_gradient.defvjp(_refuse, _refuse)


def _reduce_exact(
    leaves: dict[int, Array], axis_name: str, num_workers: int, mean: bool
) -> dict[int, Array]:
    """Sums leaves exactly: floating ones in one float32 message for each set of axes that they vary
    over (f64 and complex in their own), others as they are.
    """
    result: dict[int, Array] = {}
    floats: dict[frozenset[str], dict[int, Array]] = {}
    for index, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float64:
            floats.setdefault(compat.varying_axes(leaf), {})[index] = leaf
        elif leaf.dtype == jnp.bool_:
            result[index] = lax.pmax(leaf.astype(jnp.uint8), axis_name).astype(jnp.bool_)
        else:
            integral = jnp.issubdtype(leaf.dtype, jnp.integer)
            # The sum of small integers may not fit where their mean does.
            wide = leaf.astype(jnp.int32) if integral and leaf.dtype.itemsize < 4 else leaf
            total = lax.psum(wide, axis_name)
            if mean:
                divisor = np.array(num_workers, wide.dtype)
                total = total // divisor if integral else total / divisor
            result[index] = total.astype(leaf.dtype)
    for group in floats.values():
        flat = jnp.concatenate([leaf.astype(jnp.float32).reshape(-1) for leaf in group.values()])
        total = lax.psum(flat, axis_name)
        total = total * np.float32(1 / num_workers) if mean else total
        offsets = np.cumsum([leaf.size for leaf in group.values()])[:-1]
        for (index, leaf), part in zip(group.items(), jnp.split(total, offsets), strict=True):
            result[index] = part.reshape(leaf.shape).astype(leaf.dtype)
    return result
