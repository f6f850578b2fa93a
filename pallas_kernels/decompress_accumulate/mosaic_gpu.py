"""Mosaic GPU kernel of `decompress_accumulate`."""

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels import mosaic_gpu_blocks as blocks
from pallas_kernels.mosaic_gpu_launch import row_shape, store_rows
from pallas_kernels.operands import scalar


def decompress_accumulate(
    payloads: Array, rows: Array, order: Array, chunk: Array | int, *, layout: Layout
) -> Array:
    """See `pallas_kernels.decompress_accumulate.api`."""
    received = payloads.shape[0]

    def kernel(block, chunk_ref, order_ref, rows_ref, messages_ref, sums_ref):
        chunk = chunk_ref[0]
        pieces = blocks.partial_sum(
            block,
            rows_ref,
            lambda row: order_ref[chunk, block.place + row],
            [messages_ref.at[i] for i in range(received)],
        )
        # Neighbours stay neighbours: nothing to scatter, so no need to pass shared memory again.
        store_rows(sums_ref, block.place, pieces)

    row = row_shape(layout.group_size)
    sums = blocks.for_each_block(
        kernel,
        layout,
        [scalar(chunk), order, rows.reshape(-1, *row), payloads],
        shape_like((layout.rows_per_chunk, *row), jnp.float32, rows),
        staged=rows.dtype,
    )
    return sums.reshape(layout.rows_per_chunk, SUPER_GROUP_SIZE)
