"""Leaves of a tree: checked, flagged, joined into flat vectors, and cut out of these again."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._buckets import checks


def named_leaves(tree: Any) -> tuple[list[tuple[str, Array]], Any]:
    """Return the leaves of a tree as arrays, with the names for errors, and its structure.

    Raises:
      TypeError: a leaf is not an array or number.
      ValueError: a leaf cannot be made part of a flat vector.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = []
    for path, leaf in paths_and_leaves:
        if isinstance(leaf, bool | int | float | complex | np.number):
            leaf = jnp.asarray(leaf)
        name = jax.tree_util.keystr(path)
        checks.check_leaf(name, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.check_flattens(name, leaf)
        named.append((name, leaf))
    return named, structure


def mask_flags(mask: Any | Callable[[Any], Any] | None, tree: Any) -> list[bool] | None:
    """Return a flag for every leaf of a tree, in flattened order; None if there is no mask.

    Args:
      mask: pytree of bools like the tree (a prefix suffices), or a function from the tree to one.
      tree: the tree.

    Raises:
      ValueError: the mask does not fit the tree.
    """
    if mask is None:
        return None
    prefix = mask(tree) if callable(mask) else mask
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
    except ValueError as error:
        raise ValueError(
            f"mask={prefix!r:.200} does not fit the tree: {error}. Give a tree of bools "
            "with their structure, or a prefix of it."
        ) from None
    return [bool(flag) for flag in flags]


def flatten(indices: Sequence[int], leaves: Sequence[Array]) -> Array:
    """Join some leaves, of one dtype, into one vector [size]."""
    return jnp.concatenate([leaves[index].reshape(-1) for index in indices])


def unflatten(
    indices: Sequence[int], flat: Array, like: Sequence[Any] | Mapping[int, Any]
) -> dict[int, Array]:
    """Invert `flatten`: leaf index to array, of the shapes and dtypes of `like`."""
    sizes = [math.prod(like[index].shape) for index in indices]
    parts = jnp.split(flat, np.cumsum(sizes)[:-1]) if len(sizes) > 1 else [flat]
    return {
        index: part.reshape(like[index].shape).astype(like[index].dtype)
        for index, part in zip(indices, parts, strict=True)
    }


def wire_dtype(dtype: Any) -> Any:
    """Return the dtype that methods take: float64 goes through float32."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float64 else dtype
