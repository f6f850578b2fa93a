"""Averages in rounds over the axes of a grid of peers, some of them dead (Moshpit All-Reduce)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

import dynamiq_jax as dq
from dynamiq_jax.methods import Exact, Method
from dynamiq_jax.parts import check_integer, same_over, vary_over
from dynamiq_jax.parts.collectives import check_floating, check_key, find_axes, varying_axes

Tree = TypeVar("Tree")


def moshpit_mean(
    tree: Tree,
    axis_name: str | Sequence[str],
    *,
    key: Array,
    alive: ArrayLike = True,
    rounds: int | None = None,
    first: int = 0,
    method: Method | str | Mapping[str, Method | str] | dq.Compression = Exact(),
) -> Tree:
    """Average a pytree over a grid of peers, one axis after the other, without those that are dead.

    In each round, the peers on a line of one axis average among those of them that are alive. A
    dead peer keeps its values, and so do all peers of a line on which all are dead. After a round
    over each axis, and without dead peers, all have the mean over the grid. With dead ones, peers
    are left with different values near the mean: keep them along the axes of the grid, such as
    `P(("x", "y"))`. With an exact method, no round changes the sum over all peers, whoever is dead.
    `moshpit_variance` predicts the differences that are left.

    A dead peer is one that is announced: its program runs all collectives like the others, and
    sends zeros. A peer that hangs or crashes without a word stops its collective, as any.

    Use it inside `jax.shard_map` or nested `jax.vmap` with the axes.

    Args:
      tree: pytree of floating arrays, of this peer. Narrow dtypes travel as float32 if the method
        is exact, as rounds are not rounded to them in between.
      axis_name: axes of the grid, or its only one.
      key: PRNG key, the same on all peers, another one at every call.
      alive: whether this peer takes part: a bool, or one for each round, bool [rounds]. By default,
        all do, and the result is the same for all peers by its type.
      rounds: number of rounds; by default one for each axis.
      first: number of the first round, which is over axis `first % len(axis_name)`. If a call does
        not go over all axes, the next one goes on with the others. Lossy methods then leave peers
        with different values, as far as they err: lines that have the same values share their noise
        in one call only.
      method: compression method without state; see `psum`. The errors of all rounds add up, and a
        lossy method errs in proportion to what it is given: use it for gradients and changes of
        parameters, not for parameters.

    Returns:
      A tree of the same structure, shapes and dtypes. NaN of a peer that is alive surfaces on its
      line in the first round, and from there in the next ones. NaN of a dead peer stays with it.

    Raises:
      ValueError: an unknown or repeated axis; `alive` of another shape; `rounds` or `first` out of
        range; and as `psum`.
      TypeError: `alive` that is not boolean; a leaf that is not floating; a key that is not one.

    The method is Moshpit All-Reduce (arXiv 2103.03239, section 3.2), on a full grid whose axes
    take turns.

    >>> import jax, jax.numpy as jnp
    >>> average = lambda x: moshpit_mean(x, ("x", "y"), key=jax.random.key(0))
    >>> grid = jnp.arange(6.0).reshape(2, 3, 1)
    >>> jax.vmap(jax.vmap(average, axis_name="y"), axis_name="x")(grid).squeeze()
    Array([[2.5, 2.5, 2.5],
           [2.5, 2.5, 2.5]], dtype=float32)
    """
    compression = dq.Compression.of(method)
    if compression.max_error is not None:
        raise ValueError(
            f"max_error={compression.max_error!r} limits the error of one sum, but groups of peers "
            "would exceed it at different times here. Give dq.Compression() without it."
        )
    if isinstance(compression.method, Method) and compression.method.is_stateful:
        raise ValueError(
            f"method={method!r} carries state from call to call, which moshpit_mean cannot keep. "
            "Give one without, such as dq.DynamiQ()."
        )
    names = find_axes(tuple(axis_name) if isinstance(axis_name, list) else axis_name).names
    rounds = len(names) if rounds is None else rounds
    check_integer("rounds", rounds, 1)
    check_integer("first", first, 0)
    masks = _check_alive(alive, rounds)
    key = check_key(key, names)
    summed = functools.partial(dq.psum, method=compression)
    given = _floating(tree)
    tree = jax.tree.map(_widened, given)
    for number in range(rounds):
        turns = [names[(first + turn) % len(names)] for turn in range(number + 1)]
        line = _Line(axis=turns[-1], averaged=tuple({*turns[:-1]} - {turns[-1]}), grid=names)
        tree = line.mean(tree, masks[number], jax.random.fold_in(key, first + number), summed)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), tree, given)


@dataclasses.dataclass(frozen=True)
class _Line:
    """Lines of a grid along one axis, in one round."""

    axis: str
    averaged: tuple[str, ...]  # other axes that had their turn in earlier rounds
    grid: tuple[str, ...]  # all axes

    def mean(self, tree: Tree, alive: Array, key: Array, summed: Callable[..., Tree]) -> Tree:
        """Average over each line, among peers that are alive; `summed` as `dq.psum`."""
        everybody = _is_always(alive)
        # Not a product: zero times NaN is NaN.
        sent = jax.tree.map(lambda leaf: jnp.where(alive, leaf, jnp.zeros_like(leaf)), tree)
        # Lines with other values have noise of their own, so that errors are averaged later. Those
        # that have the same ones, if nobody was dead, share it and keep the same bits.
        others = [name for name in self.grid if name != self.axis]
        for name in others:
            if name not in self.averaged:
                key = jax.random.fold_in(key, lax.axis_index(name))
        total = summed(
            jax.tree.map(lambda leaf: self._as_of_one_line(leaf, others), sent),
            self.axis,
            key=functools.reduce(same_over, others, key),
        )
        living: Array | int = lax.axis_size(self.axis)
        if not everybody:
            count = lax.psum(_vary(alive.astype(jnp.float32), self.axis), self.axis)
            living = jnp.maximum(count, 1)

        def merged(total: Array, sent: Array, own: Array) -> Array:
            for name in sorted(varying_axes(sent) & set(others)):
                total = _vary(total, name)
            mean = total / jnp.asarray(living, total.dtype)
            return mean if everybody else jnp.where(alive, mean, own)

        return jax.tree.map(merged, total, sent, tree)

    def _as_of_one_line(self, leaf: Array, others: Sequence[str]) -> Array:
        """Mark a value as varying along the line alone: `dq.psum` does not see the others."""
        return functools.reduce(same_over, others, _vary(leaf, self.axis))


def _is_always(alive: Array) -> bool:
    """Return whether a mask is True while tracing: types then say that a line has one mean."""
    return not isinstance(alive, jax.core.Tracer) and bool(alive)


def _vary(leaf: Array, axis_name: str) -> Array:
    """Mark a value as varying over an axis; workers may hold the same one."""
    if axis_name in varying_axes(leaf):
        return leaf
    return vary_over(leaf, (axis_name,))


def _floating(tree: Tree) -> Tree:
    """Return a tree with leaves that are floating arrays."""
    check_floating("tree", tree, "which has no mean. Give the floating leaves alone.")
    return jax.tree.map(jnp.asarray, tree)


def _widened(leaf: Array) -> Array:
    """Return a leaf in a dtype that does not round the mean of a round before the next one."""
    return leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf


def _check_alive(alive: Any, rounds: int) -> list[Array]:
    """Return a mask for each round."""
    mask = alive if isinstance(alive, jax.Array) else np.asarray(alive)
    if mask.dtype != bool:
        raise TypeError(f"alive={alive!r:.80} has dtype {mask.dtype}. Give booleans.")
    if mask.shape not in ((), (rounds,)):
        raise ValueError(
            f"alive has shape {mask.shape}. Give one bool, or one for each of the {rounds} rounds."
        )
    with jax.ensure_compile_time_eval():  # a mask that is no tracer stays none
        return [jnp.asarray(mask if mask.ndim == 0 else mask[number]) for number in range(rounds)]
