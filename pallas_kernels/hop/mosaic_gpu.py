"""Mosaic GPU kernel of `hop`, and of `compress`, which is a hop that receives nothing."""

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.compat import shape_like
from pallas_kernels import mosaic_gpu_blocks as blocks
from pallas_kernels.mosaic_gpu_launch import row_shape
from pallas_kernels.operands import scalar


def hop(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
) -> Array:
    """See `pallas_kernels.hop.api`."""
    received = payloads.shape[0]

    def kernel(block, chunk_ref, turn_ref, seed_ref, order_ref, rows_ref, *messages):
        *received_ref, sent_ref = messages
        chunk = chunk_ref[0]
        pieces = blocks.partial_sum(
            block,
            rows_ref,
            lambda row: order_ref[chunk, block.place + row],
            [received_ref[0].at[i] for i in range(received)],
        )
        blocks.encode(block, pieces, chunk, turn_ref[0], seed_ref, sent_ref)

    pieces_of_rows = rows.reshape(-1, *row_shape(layout.group_size))
    messages = [payloads] if received else []
    return blocks.for_each_block(
        kernel,
        layout,
        [scalar(chunk), scalar(turn), seed, order, pieces_of_rows, *messages],
        shape_like((layout.payload_bytes,), jnp.uint8, rows),
        staged=rows.dtype,
    )
