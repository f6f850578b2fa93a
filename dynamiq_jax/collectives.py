"""`psum` and `pmean` of whole pytrees, compressed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array

from dynamiq_jax import buckets, checks, compat, exact
from dynamiq_jax.axes import Axes, AxisName, find_axes
from dynamiq_jax.buckets import Bucket, Options
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.methods.base import State
from dynamiq_jax.no_gradient import refuse_gradient
from dynamiq_jax.topologies import Auto, Topology

Tree = TypeVar("Tree")


def psum(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array,
    method: Method | str = DynamiQ(),
    topology: Topology | Auto | str = "ring",
    mask: Any | Callable[[Any], Any] | None = None,
    exact_below: int = buckets.EXACT_BELOW,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> Tree:
    """Sum over an axis, like `jax.lax.psum`, with floating-point leaves compressed on the wire.

    Use it inside `jax.shard_map`, with `check_vma` True or False, or inside `jax.vmap(...,
    axis_name=...)`, which simulates workers on one device. All workers get the same bits.

    Args:
      tree: pytree of arrays. Floating leaves (f16, bf16, f32; f64 through f32) of at least
        `exact_below` elements are compressed; other leaves are summed exactly. Boolean leaves give
        whether any worker has True.
      axis_name: one axis, or several with the slowest link first: `("hosts", "local")` sums exactly
        over `local`, a part on each worker, compresses over `hosts`, and gathers exactly.
      key: typed PRNG key, the same on all workers, another one at every step. The same key gives
        the same bits.
      method: how numbers become bytes: a method, or the name of one.
      topology: how chunks travel: a topology, or the name of one.
      mask: pytree of bools like the tree (a prefix will do), or a function from the tree to one:
        leaves marked False are summed exactly.
      exact_below: leaves of fewer elements are summed exactly.
      bucket_bytes: leaves of one dtype are compressed together, in buckets of at most as many bytes
        of gradient (or of one leaf), the last leaves first. The compiler can send one while the
        backward pass still computes another; each compiles its own codec.

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
    options = buckets.resolve_options(method, topology, exact_below, bucket_bytes)
    return _reduce(tree, axis_name, key, options, mask, mean=False)


def pmean(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array,
    method: Method | str = DynamiQ(),
    topology: Topology | Auto | str = "ring",
    mask: Any | Callable[[Any], Any] | None = None,
    exact_below: int = buckets.EXACT_BELOW,
    bucket_bytes: int = buckets.BUCKET_BYTES,
) -> Tree:
    """Mean over an axis, like `jax.lax.pmean`, with floating-point leaves compressed on the wire.

    As `psum`, divided by the size of the axis in float32 before the result is cast to each leaf's
    dtype. Dtypes are kept: the mean of an integer leaf is floored, and a boolean leaf gives whether
    any worker has True.
    """
    options = buckets.resolve_options(method, topology, exact_below, bucket_bytes)
    return _reduce(tree, axis_name, key, options, mask, mean=True)


def _reduce(
    tree: Tree, axis_name: AxisName, key: Array, options: Options, mask: Any, *, mean: bool
) -> Tree:
    refuse_state(options.method, "pmean" if mean else "psum")
    flags = buckets.mask_flags(mask, tree)
    return reduce_tree(
        tree, axis_name, key=key, options=options, compress=flags, mean=mean, states=None
    )[0]


def refuse_state(method: Method, function: str) -> None:
    """Raises ValueError for a method whose state a function has nowhere to keep."""
    if method.is_stateful:
        raise ValueError(
            f"method={method!r} carries state from step to step, which dq.{function} cannot keep. "
            "Use dq.all_reduce_gradients inside jax.shard_map: its optimizer state holds it."
        )


def init_states(
    tree: Any, axis_name: AxisName, options: Options, compress: Sequence[bool] | None = None
) -> tuple[State, ...]:
    """States of a method for every bucket of a tree, before the first step."""
    axes = find_axes(axis_name)
    leaves = jax.tree.leaves(tree)
    plan = buckets.plan(
        leaves, axes, options, compress=compress, kinds=buckets.other_axes(leaves, axes)
    )
    return tuple(_initial_state(bucket, axes) for bucket in plan.buckets)


def _initial_state(bucket: Bucket, axes: Axes) -> State:
    """A constant for all workers, but what follows it is not."""
    state = bucket.method.init_state(bucket.part_size, axes.num_slow)
    return compat.vary_over(state, axes.names)


def _check_states(states: tuple[State, ...], planned: Sequence[Bucket], axes: Axes) -> None:
    """Raises ValueError for states that were made for other buckets."""
    wanted = jax.eval_shape(lambda: tuple(_initial_state(bucket, axes) for bucket in planned))
    shapes = [
        [(jax.tree_util.keystr(path), np.shape(leaf)) for path, leaf in found]
        for found in map(jax.tree_util.tree_leaves_with_path, (states, wanted))
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"state.method has arrays of shapes {shapes[0]}, but these gradients need {shapes[1]}. "
            "It belongs to leaves of other shapes or dtypes, or to another method, mask, "
            "exact_below, bucket_bytes or number of workers. Call init with what update gets."
        )


def reduce_tree(
    tree: Tree,
    axis_name: AxisName,
    *,
    key: Array,
    options: Options,
    compress: Sequence[bool] | None = None,
    mean: bool,
    states: tuple[State, ...] | None,
) -> tuple[Tree, tuple[State, ...]]:
    """What `psum`, `pmean` and `all_reduce_gradients` share; see `psum`.

    Args beyond those of `psum`:
      compress: False for leaves, in flattened order, that are to be summed exactly.
      mean: divide by the number of workers.
      states: the method's state for every bucket, None for those of a first step.

    Returns:
      The reduced tree and the next states.
    """
    axes = find_axes(axis_name)
    key = checks.check_key(key, axes.names)
    named, structure = buckets.leaves_to_sum(tree, axes)
    leaves = [leaf for _, leaf in named]
    plan = buckets.plan(
        leaves, axes, options, compress=compress, kinds=buckets.other_axes(leaves, axes)
    )
    if states is not None:
        _check_states(states, plan.buckets, axes)
    divisor = axes.num_workers if mean else 1
    result = exact.all_reduce({index: leaves[index] for index, _ in plan.exact}, axes, divisor)
    result |= {index: leaves[index] for index in plan.untouched}
    next_states: list[State] = [()] * len(plan.buckets)
    earlier = None
    # The last leaves first: in a backward pass their gradients are there first.
    for number, bucket in reversed(list(enumerate(plan.buckets))):
        state = _initial_state(bucket, axes) if states is None else states[number]
        flat = buckets.after(earlier, refuse_gradient(buckets.flatten(bucket, leaves)))
        total, next_states[number], arrived = bucket.method.all_reduce(
            axes.scatter(flat),
            axes.slow,
            axes.num_slow,
            topology=bucket.topology,
            key=axes.fold_in(jax.random.fold_in(key, number)),
            state=state,
        )
        total = total * np.float32(1 / divisor) if mean else total
        # In the dtype that it will have anyway: fewer bytes over the fast axes.
        total = axes.gather(total.astype(bucket.dtype), bucket.size)
        earlier = total if axes.fast else arrived
        result |= buckets.unflatten(bucket, total, leaves)
    return jax.tree.unflatten(structure, [result[index] for index in range(len(leaves))]), tuple(
        next_states
    )
