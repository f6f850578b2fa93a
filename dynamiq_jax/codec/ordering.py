"""Statistics to order: which row of the bucket goes to which place of which chunk.

Width classes are dealt evenly over the chunks, so that every chunk has the same static layout. No
communication: all workers hold the same statistics bit for bit, and a stable sort of integers is
the same everywhere.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.codec.layout import Layout


def order_rows(norm_bits: Array, layout: Layout, *, consecutive: bool = False) -> Array:
    """Norms as bfloat16 bits, uint16 [num_rows], to original row indices int32 [num_chunks,
    rows_per_chunk]. Chunks are of consecutive rows if told so, each sorted on its own.
    """
    if consecutive:
        of_chunks = norm_bits.reshape(layout.num_chunks, layout.rows_per_chunk)
        ranked = jnp.argsort(np.uint16(0xFFFF) - of_chunks, axis=1, stable=True).astype(jnp.int32)
        firsts = np.arange(layout.num_chunks, dtype=np.int32) * layout.rows_per_chunk
        return ranked + firsts[:, None]
    ranked = jnp.argsort(np.uint16(0xFFFF) - norm_bits, stable=True).astype(jnp.int32)
    dealt = []
    for width_class in layout.classes:
        first = layout.num_chunks * width_class.first_row
        members = ranked[first : first + layout.num_chunks * width_class.rows]
        dealt.append(members.reshape(width_class.rows, layout.num_chunks).T)
    return jnp.concatenate(dealt, axis=1)


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
