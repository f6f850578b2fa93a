"""XLA base of `decompress`, and the block decoding that it shares with `hop`."""

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout, WidthClass
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.codec.rows import decode_rows
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import for_each_block


def decompress(payloads: Array, *, layout: Layout) -> Array:
    """See `pallas_kernels.decompress.api`."""
    num_chunks = payloads.shape[0]

    def chunk_step(chunk: Array, decoded: Array) -> Array:
        payload = lax.dynamic_index_in_dim(payloads, chunk, keepdims=False)

        def step(width_class: WidthClass, start: Array | int, count: int, decoded: Array) -> Array:
            first = width_class.first_row + start
            block = decode_block(payload, width_class, first, count, layout=layout)
            return lax.dynamic_update_slice_in_dim(
                decoded, block, chunk * layout.rows_per_chunk + first, axis=0
            )

        return for_each_block(layout, step, decoded)

    empty = jnp.zeros((num_chunks * layout.rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32)
    return lax.fori_loop(0, num_chunks, chunk_step, match_varying(empty, payloads))


def decode_block(
    payload: Array, width_class: WidthClass, first: Array | int, count: int, *, layout: Layout
) -> Array:
    """Rows at places `first .. first + count` of a message, of one class: float32 [count, 256]."""
    group_bytes, super_bits = layout.scales(payload)
    start = first - width_class.first_row
    return decode_rows(
        tuple(
            lax.dynamic_slice_in_dim(plane, start, count)
            for plane in layout.planes(payload, width_class)
        ),
        lax.dynamic_slice_in_dim(group_bytes, first, count),
        lax.dynamic_slice_in_dim(super_bits, first, count),
        width=width_class.width,
        nonuniformity=width_class.nonuniformity,
        group_size=layout.group_size,
    )
