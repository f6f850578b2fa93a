"""Triton kernel of `decompress`."""

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels import triton_message as message
from pallas_kernels import triton_rows
from pallas_kernels.triton_blocks import for_each_block
from pallas_kernels.triton_launch import Config


def decompress(
    payloads: Array, order: Array, *, layout: Layout, config: Config | None = None
) -> Array:
    """See `pallas_kernels.decompress.api`."""

    def kernel(block, order_ref, messages_ref, rows_ref):
        chunk = pl.program_id(1)
        pieces = triton_rows.decode(block, messages_ref, chunk * (layout.payload_bytes // 2))
        triton_rows.scatter(pieces, rows_ref, order_ref[chunk, block.place])

    return for_each_block(
        kernel,
        layout,
        config or Config(),
        [order, message.halves(payloads)],
        shape_like((layout.num_rows, SUPER_GROUP_SIZE), jnp.float32, payloads),
        chunks=layout.num_chunks,
    )
