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
_NORM_BITS = 15
_LARGEST_NORM = np.uint16((1 << _NORM_BITS) - 1)


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


def rank(norm_bits: Array) -> Array:
    """Norms as bfloat16 bits, or other uint16 below 2^15, to indices along the last axis, int32:
    largest first, of equal ones the first.
    """
    index_bits = (norm_bits.shape[-1] - 1).bit_length()
    if _NORM_BITS + index_bits > 32:
        return jnp.argsort(_LARGEST_NORM - norm_bits, axis=-1, stable=True).astype(jnp.int32)
    # Both in one word: one array of integers sorts five times faster than keys with values.
    index = lax.broadcasted_iota(jnp.uint32, norm_bits.shape, norm_bits.ndim - 1)
    keys = (_LARGEST_NORM - norm_bits).astype(jnp.uint32) << np.uint32(index_bits) | index
    return (jnp.sort(keys, axis=-1) & np.uint32((1 << index_bits) - 1)).astype(jnp.int32)


def move_rows(energies: Array, widths: np.ndarray) -> Array:
    """Rows of one chunk to places of the widths that suit their sums.

    The rows with the largest energies take the widest places. A row that is at such a place already
    stays there, with its rounding offsets, so that its errors still cancel those of earlier turns.

    Args:
      energies: of the row at each place, uint16 [rows_per_chunk] below 2^15.
      widths: of each place, [rows_per_chunk], widest first.

    Returns:
      Which row takes each place, int32 [rows_per_chunk].
    """
    size, wanted, ranked = widths.size, jnp.asarray(widths), rank(energies)
    # Both in the order of widths, so that the k-th row that moves belongs to the k-th free place.
    (free,) = jnp.nonzero(wanted[_inverse(ranked)] != wanted, size=size, fill_value=size)
    (moving,) = jnp.nonzero(wanted[ranked] != wanted, size=size, fill_value=0)
    return jnp.arange(size, dtype=jnp.int32).at[free].set(ranked[moving], mode="drop")


def restore_rows(rows: Array, order: Array) -> Array:
    """Inverse of gathering by `order`: decoded rows [num_chunks * rows_per_chunk, 256] back at
    their original indices.
    """
    inverse = _inverse(order.reshape(-1))
    return rows.at[inverse].get(unique_indices=True, mode="promise_in_bounds")


def _inverse(order: Array) -> Array:
    """Place of each index: a permutation int32 [n] to int32 [n]."""
    return (
        jnp.zeros_like(order)
        .at[order]
        .set(
            jnp.arange(order.size, dtype=order.dtype),
            unique_indices=True,
            mode="promise_in_bounds",
        )
    )
