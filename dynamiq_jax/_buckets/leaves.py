"""Leaves of a tree: checks, flat vectors of several leaves, and the way back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._buckets import cutting
from dynamiq_jax._inputs import checks


def named_leaves(tree: Any) -> tuple[list[tuple[str, Array]], Any]:
    """Return the leaves of a tree as arrays, with the names for errors, and its structure.

    Args:
      tree: pytree of arrays and numbers.

    Raises:
      TypeError: a leaf is not an array or number.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = []
    for path, leaf in paths_and_leaves:
        if isinstance(leaf, bool | int | float | complex | np.number):
            leaf = jnp.asarray(leaf)
        name = jax.tree_util.keystr(path)
        checks.check_leaf(name, leaf)
        named.append((name, leaf))
    return named, structure


def join(leaves: Sequence[Array], multiple: int) -> Array:
    """Join leaves [rows, coordinates] into one vector, with rows padded to a multiple.

    Methods take float32, to which float64 is cast.
    """
    size = sum(leaf.shape[1] for leaf in leaves)
    rows = cutting.join(leaves, size + -size % multiple)
    return rows.astype(jnp.float32 if rows.dtype == jnp.float64 else rows.dtype).reshape(-1)


def split_rows(flat: Array, sizes: Sequence[int], num_rows: int) -> list[Array]:
    """Invert `join`: leaves [num_rows, size]."""
    return cutting.cut(flat.reshape(num_rows, -1), sizes)
