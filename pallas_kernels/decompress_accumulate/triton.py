"""Triton kernel of `decompress_accumulate`."""

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels import triton_message as message
from pallas_kernels import triton_rows
from pallas_kernels.operands import scalar
from pallas_kernels.triton_blocks import for_each_block
from pallas_kernels.triton_launch import Config


def decompress_accumulate(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    *,
    layout: Layout,
    config: Config | None = None,
) -> Array:
    """See `pallas_kernels.decompress_accumulate.api`."""
    received = payloads.shape[0]

    def kernel(block, chunk_ref, order_ref, rows_ref, messages_ref, sums_ref):
        row = order_ref[chunk_ref[0], block.place]
        pieces = triton_rows.partial_sum(block, rows_ref, row, messages_ref, received)
        triton_rows.scatter(pieces, sums_ref, block.place)

    return for_each_block(
        kernel,
        layout,
        config or Config(),
        [scalar(chunk), order, rows, message.halves(payloads)],
        shape_like((layout.rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32, rows),
    )
