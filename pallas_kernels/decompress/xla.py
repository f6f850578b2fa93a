"""XLA base of `decompress`, and the decoding that it shares with `hop`."""

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.codec.rows import decode_rows
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import for_each_block


def decompress(payloads: Array, *, layout: Layout) -> Array:
    """See `pallas_kernels.decompress.api`."""
    num_chunks, places = payloads.shape[0], layout.rows_per_chunk

    def chunk_step(chunk: Array, decoded: Array) -> Array:
        parts = layout.unpack(lax.dynamic_index_in_dim(payloads, chunk, keepdims=False))

        def step(first: Array | int, count: int, decoded: Array) -> Array:
            block = decode_block(parts, first, count, layout=layout)
            return lax.dynamic_update_slice_in_dim(decoded, block, chunk * places + first, axis=0)

        return for_each_block(places, step, decoded)

    empty = jnp.zeros((num_chunks * places, SUPER_GROUP_SIZE), jnp.float32)
    return lax.fori_loop(0, num_chunks, chunk_step, match_varying(empty, payloads))


def decode_block(
    parts: tuple[Array, Array, Array], first: Array | int, count: int, *, layout: Layout
) -> Array:
    """Rows at places `first .. first + count` of an unpacked message: float32 [count, 256]."""
    codes, group_bytes, super_bits = (
        lax.dynamic_slice_in_dim(part, first, count) for part in parts
    )
    levels = layout.levels(first, count)
    return decode_rows(codes, group_bytes, super_bits, levels, group_size=layout.group_size)
