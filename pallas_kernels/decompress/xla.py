"""XLA base of `decompress`."""

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.ordering import restore_rows
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import decode_block, for_each_block


def decompress(payloads: Array, order: Array, *, layout: Layout) -> Array:
    """See `pallas_kernels.decompress.api`."""
    num_chunks, places = order.shape

    def chunk_step(chunk: Array, decoded: Array) -> Array:
        parts = layout.unpack(lax.dynamic_index_in_dim(payloads, chunk, keepdims=False))

        def step(first: Array | int, count: int, decoded: Array) -> Array:
            block = decode_block(parts, first, count, layout=layout)
            return lax.dynamic_update_slice_in_dim(decoded, block, chunk * places + first, axis=0)

        return for_each_block(places, step, decoded)

    empty = jnp.zeros((num_chunks * places, SUPER_GROUP_SIZE), jnp.float32)
    decoded = lax.fori_loop(0, num_chunks, chunk_step, match_varying(empty, payloads))
    return restore_rows(decoded, order)
