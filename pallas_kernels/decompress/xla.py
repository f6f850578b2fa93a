"""XLA base of `decompress`."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import decode_rows_of, for_each_block


def decompress(payloads: Array, order: Array, *, layout: Layout) -> Array:
    """See `pallas_kernels.decompress.api`."""
    # All at once: unpacking a message that a loop slices is twelve times slower on XLA:CPU.
    messages = jax.vmap(layout.unpack)(payloads)
    num_chunks, places = order.shape

    def chunk_step(chunk: Array, decoded: Array) -> Array:
        def step(first: Array | int, count: int, decoded: Array) -> Array:
            rows = lax.dynamic_slice(order, (chunk, first), (1, count))[0]
            values = decode_rows_of(messages, chunk, first, count, layout=layout)
            # Straight to where they belong: a second array of this size would cost as much again.
            return decoded.at[rows].set(values, unique_indices=True, mode="promise_in_bounds")

        return for_each_block(places, step, decoded)

    empty = jnp.zeros((num_chunks * places, SUPER_GROUP_SIZE), jnp.float32)
    return lax.fori_loop(0, num_chunks, chunk_step, match_varying(empty, payloads))
