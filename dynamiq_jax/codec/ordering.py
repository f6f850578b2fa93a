"""Statistics to order: which row of the bucket goes to which place of which chunk.

Width classes are dealt evenly over the chunks, so that every chunk has the same static layout. No
communication: all workers hold the same integers bit for bit, and a stable sort of these is the
same everywhere.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout

# Norms are not negative: the sign is not needed to order them.
_BITS = 15
_LARGEST = np.uint16((1 << _BITS) - 1)


def order_rows(norm_bits: Array, layout: Layout, *, consecutive: bool = False) -> Array:
    """Norms as bfloat16 bits, uint16 [num_rows], to original row indices int32 [num_chunks,
    rows_per_chunk]. Chunks are of consecutive rows if told so, each sorted on its own.
    """
    if consecutive:
        ranked = rank(norm_bits.reshape(layout.num_chunks, layout.rows_per_chunk))
        firsts = np.arange(layout.num_chunks, dtype=np.int32) * layout.rows_per_chunk
        return ranked + firsts[:, None]
    # Dealt like cards: also each class of widths, for its rows follow one another by rank.
    return rank(norm_bits).reshape(layout.rows_per_chunk, layout.num_chunks).T


def rank(weights: Array) -> Array:
    """Norms as bfloat16 bits, or other uint16 below 2^15, to indices along the last axis, int32:
    largest first, of equal ones the first.
    """
    index_bits = (weights.shape[-1] - 1).bit_length()
    if _BITS + index_bits > 32:
        return jnp.argsort(_LARGEST - weights, axis=-1, stable=True).astype(jnp.int32)
    # Both in one word: one array of integers sorts five times faster than keys with values.
    index = lax.broadcasted_iota(jnp.uint32, weights.shape, weights.ndim - 1)
    keys = (_LARGEST - weights).astype(jnp.uint32) << np.uint32(index_bits) | index
    return (jnp.sort(keys, axis=-1) & np.uint32((1 << index_bits) - 1)).astype(jnp.int32)


def restore_rows(rows: Array, order: Array) -> Array:
    """Inverse of gathering by `order`: decoded rows [num_chunks * rows_per_chunk, 256] back at
    their original indices.
    """
    places = order.reshape(-1)
    inverse = (
        jnp.zeros_like(places)
        .at[places]
        .set(
            jnp.arange(places.size, dtype=places.dtype),
            unique_indices=True,
            mode="promise_in_bounds",
        )
    )
    return rows.at[inverse].get(unique_indices=True, mode="promise_in_bounds")
