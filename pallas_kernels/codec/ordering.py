"""Rows to places: which row of the bucket goes to which place of which chunk.

Each width class is distributed evenly over the chunks, so that every chunk has the same static
layout. This takes no communication: all workers hold the same integers, and a stable sort of these
gives the same order everywhere.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.codec.layout import Layout

# Norms are not negative, so their order does not need the sign.
_BITS = 15
_LARGEST = np.uint16((1 << _BITS) - 1)


class LocalRows(NamedTuple):
    """Rows of a bucket that a worker holds, their places, and the seed of the rounding noise."""

    rows: Array  # local values in their original order, float [num_rows, 256]
    order: Array  # original row of every place, int32 [num_chunks, rows_per_chunk]
    seed: Array  # uint32 [2], the same on all workers


def order_rows(norm_bits: Array, layout: Layout, *, consecutive: bool = False) -> Array:
    """Assign rows to places by their norms, largest first.

    Args:
      norm_bits: norms as bits of bfloat16, uint16 [num_rows].
      layout: static layout of the bucket.
      consecutive: chunk c holds the c-th part of the rows, each chunk ordered by itself.

    Returns:
      Original row of every place, int32 [num_chunks, rows_per_chunk].
    """
    if consecutive:
        ranked = rank(norm_bits.reshape(layout.num_chunks, layout.rows_per_chunk))
        firsts = np.arange(layout.num_chunks, dtype=np.int32) * layout.rows_per_chunk
        return ranked + firsts[:, None]
    # Rank p goes to chunk p mod num_chunks. The rows of a class have consecutive ranks, so every
    # chunk gets the same number of them.
    return rank(norm_bits).reshape(layout.rows_per_chunk, layout.num_chunks).T


def rank(weights: Array) -> Array:
    """Sort weights along the last axis, largest first, and equal ones by their index.

    Args:
      weights: uint16 below 2^15, such as the bits of a bfloat16 that is not negative.

    Returns:
      Indices, int32 of the same shape.
    """
    index_bits = (weights.shape[-1] - 1).bit_length()
    if _BITS + index_bits > 32:
        return jnp.argsort(_LARGEST - weights, axis=-1, stable=True).astype(jnp.int32)
    # Both in one word: one array of integers sorts five times faster than keys with values.
    index = lax.broadcasted_iota(jnp.uint32, weights.shape, weights.ndim - 1)
    keys = (_LARGEST - weights).astype(jnp.uint32) << np.uint32(index_bits) | index
    return (jnp.sort(keys, axis=-1) & np.uint32((1 << index_bits) - 1)).astype(jnp.int32)


def restore_rows(rows: Array, order: Array) -> Array:
    """Put rows [num_chunks * rows_per_chunk, 256] that `order` gathered back at their indices."""
    places = order.reshape(-1)
    index = jnp.arange(places.size, dtype=places.dtype)
    at = jnp.zeros_like(places).at[places]
    inverse = at.set(index, unique_indices=True, mode="promise_in_bounds")
    return rows.at[inverse].get(unique_indices=True, mode="promise_in_bounds")
