"""Roles of aux, by which the aux of all workers is made from the aux of each worker."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import spread
from dynamiq_jax._worker_loss.rows import Split, order_of, take
from dynamiq_jax._worker_loss.weight import Weight

P = PartitionSpec
MEAN, SUM, ROWS, SAME = "mean", "sum", "rows", "same"
ROLES: Mapping[str, str] = {
    MEAN: "a mean over targets",
    SUM: "a sum or a count",
    ROWS: "a row for each example, or for each group of them",
    SAME: "equal on all workers",
}


class OfWorker(NamedTuple):
    """Aux of one worker, and its weight in a mean over workers; None for equal weights."""

    tree: Any
    weight: Weight | None


def check_roles(roles: Any, has_aux: bool) -> None:
    """Raise ValueError for roles that do not exist, or for roles without aux."""
    for role in jax.tree.leaves(roles):
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"aux holds {role!r:.80}. Give one of {', '.join(map(repr, ROLES))} for everything "
                "that the loss returns beside its value, or a tree of them."
            )
    if roles is not None and not has_aux:
        raise ValueError(
            f"aux={roles!r:.80} is given, but has_aux=False. Give has_aux=True for a loss that "
            "returns (loss, aux)."
        )


def split_result(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Split the result of a loss into its value and aux, which is None without `has_aux`.

    Raises:
      ValueError: with `has_aux`, the result is not `(loss, aux)`; the loss is not a scalar.
    """
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise ValueError(
            f"has_aux=True, but the loss returns {result!r:.80}. Give a loss that returns "
            "(loss, aux), or leave out has_aux."
        )
    loss, aux = result if has_aux else (result, None)
    if not jax.tree_util.all_leaves([loss]):
        raise ValueError(
            f"The loss returns {loss!r:.80}, and a scalar is needed. For a loss that returns "
            "(loss, aux), give has_aux=True, and aux= with the roles of its arrays."
        )
    if np.shape(loss) != ():
        raise ValueError(
            f"The loss returns an array of shape {np.shape(loss)}, and a scalar is needed. Return "
            "its mean."
        )
    return loss, aux


def roles_of(roles: Any, tree: Any) -> list[str]:
    """Return the role of every leaf of aux, in flattened order.

    Raises:
      ValueError: a leaf has no role; the roles do not fit the tree.
    """
    leaves = jax.tree.leaves(tree)
    try:
        found = spread(roles, tree)
    except ValueError as error:
        raise ValueError(
            f"aux={roles!r:.200} does not fit what the loss returns: {error}. Give one role for "
            f"all of it, or a tree such as aux={_proposal(tree)}."
        ) from None
    for role, (path, leaf) in zip(found, jax.tree.leaves_with_path(tree), strict=True):
        if role is None:
            meanings = ", ".join(f"{name!r} ({meaning})" for name, meaning in ROLES.items())
            raise ValueError(
                f"The loss returns {len(leaves)} arrays beside its value, such as "
                f"aux{jax.tree_util.keystr(path)} of shape {np.shape(leaf)}, and each worker has "
                f"its own. Say what each is, to make one of them: {meanings}. Give one role for "
                f'all, such as aux="mean", or a tree such as aux={_proposal(tree)}.'
            )
        if role == ROWS and np.ndim(leaf) == 0:
            raise ValueError(
                f"aux{jax.tree_util.keystr(path)} is a scalar and has no rows. Give another role "
                "than 'rows'."
            )
    return found


def of_workers(value: Any, role: str, weight: Weight | None, names: Sequence[str]) -> Array:
    """Return one value of all workers; rows stay the rows of each worker.

    Args:
      value: value of this worker.
      role: one of `ROLES`.
      weight: of the worker in a mean; None for equal weights.
      names: axes of the workers.
    """
    value = jnp.asarray(value)
    if role == SAME and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        bits = of_workers(jax.random.key_data(value), role, weight, names)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
    if role == SUM:
        is_small = value.dtype == bool or (
            jnp.issubdtype(value.dtype, jnp.integer) and value.dtype.itemsize < 4
        )
        # The sum of counts may not fit in the dtype of one.
        return lax.psum(value.astype(jnp.int32) if is_small else value, names)
    if role == ROWS:
        return value
    if role == SAME:
        # The value of the first worker: a maximum has no derivative.
        first = jnp.where(lax.axis_index(names) == 0, value, jnp.zeros_like(value))
        return lax.psum(first, names).astype(value.dtype)
    if not jnp.issubdtype(value.dtype, jnp.inexact):  # counts have means of their own
        value = value.astype(jnp.float32)
    return mean_of_workers(value if weight is None else weight.of(value), names)


def mean_of_workers(value: Array, names: Sequence[str]) -> Array:
    """Average over workers. Values of 16 bits, whose sum may be infinite, are added in float32."""
    if value.dtype.itemsize >= 4:
        return lax.pmean(value, names)
    return lax.pmean(value.astype(jnp.float32), names).astype(value.dtype)


def out_specs(roles: Any, axes: Any) -> Any:
    """Return specs of the results of `of_workers` over the workers, a tree like the roles."""
    return jax.tree.map(lambda role: P(axes) if role == ROWS else P(), roles)


def take_rows(roles: Any, tree: Any) -> tuple[list[Array], Any]:
    """Return the leaves of aux that are rows, and the tree with an empty array for each of them."""
    rows = []

    def other(role: str, leaf: Any) -> Any:
        if role != ROWS:
            return leaf
        rows.append(leaf)
        return jnp.zeros(0)

    return rows, map_roles(other, roles, tree)


def put_rows(rows: Sequence[Array], roles: Any, tree: Any) -> Any:
    """Return a tree of `take_rows` with rows in place of its empty arrays."""
    left = iter(rows)
    return map_roles(lambda role, leaf: next(left) if role == ROWS else leaf, roles, tree)


def in_order_of_batch(
    roles: Any, tree: Any, splits: Mapping[int, set[Split | None]], workers: int
) -> Any:
    """Return aux with rows in the order of the batch.

    An array with as many rows as the batch gets the order of the batch. Other arrays, such as one
    row for each pair, keep the order of the workers.

    Args:
      roles: as a user gives them.
      tree: aux, with rows of all workers.
      splits: rules by the number of rows of arrays of the batch.
      workers: number of workers.
    """
    if roles is None:
        return tree

    def ordered(role: str, leaf: Array) -> Array:
        if role != ROWS:
            return leaf
        rules = splits.get(leaf.shape[0], {None})
        orders = {order_of(rule, leaf.shape[0], workers).tobytes() for rule in rules}
        if len(orders) > 1:
            raise ValueError(
                f"aux holds rows of shape {leaf.shape}, but the arrays of the batch with "
                f"{leaf.shape[0]} rows are split in {len(orders)} ways. Split them alike."
            )
        return take(leaf, np.argsort(order_of(next(iter(rules)), leaf.shape[0], workers).ravel()))

    return map_roles(ordered, roles, tree)


def map_roles(function: Callable[[str, Any], Any], roles: Any, tree: Any) -> Any:
    """Return a tree of a function of the role and the value of every leaf of aux."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(roles_of(roles, tree), leaves, strict=True)
    return jax.tree.unflatten(structure, [function(role, leaf) for role, leaf in pairs])


def _proposal(tree: Any) -> str:
    """Return roles for aux as Python code: rows for arrays, sums for integers, means for others."""

    def guess(leaf: Any) -> str:
        if np.ndim(leaf):
            return ROWS
        is_mean = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        return MEAN if is_mean else SUM

    return f"{jax.tree.map(guess, tree)!r:.300}"
