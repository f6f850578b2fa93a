"""Mosaic GPU kernel of `decompress`."""

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels import mosaic_gpu_blocks as blocks
from pallas_kernels.mosaic_gpu_launch import row_shape


def decompress(payloads: Array, order: Array, *, layout: Layout) -> Array:
    """See `pallas_kernels.decompress.api`."""

    def kernel(block, order_ref, messages_ref, rows_ref):
        chunk = lax.axis_index("chunk")
        pieces = blocks.decode(block, blocks.receive(block, messages_ref.at[chunk]))
        blocks.scatter(block, pieces, rows_ref, lambda row: order_ref[chunk, block.place + row])

    shape = (layout.num_rows, *row_shape(layout.group_size))
    rows = blocks.for_each_block(
        kernel,
        layout,
        [order, payloads],
        shape_like(shape, jnp.float32, payloads),
        staged=jnp.float32,
        chunks=layout.num_chunks,
    )
    return rows.reshape(layout.num_rows, SUPER_GROUP_SIZE)
