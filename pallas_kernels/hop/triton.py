"""Triton kernel of `hop`, and of `compress`, which is a hop that receives nothing."""

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.compat import shape_like
from pallas_kernels import triton_message as message
from pallas_kernels import triton_rows
from pallas_kernels.operands import scalar
from pallas_kernels.triton_blocks import for_each_block
from pallas_kernels.triton_launch import Config


def hop(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
    config: Config | None = None,
) -> Array:
    """See `pallas_kernels.hop.api`."""
    received = payloads.shape[0]

    def kernel(block, chunk_ref, turn_ref, seed_ref, order_ref, rows_ref, *messages):
        received_ref, sent_ref = messages[0], messages[-1]
        chunk = chunk_ref[0]
        row = order_ref[chunk, block.place]
        pieces = triton_rows.partial_sum(block, rows_ref, row, received_ref, received)
        triton_rows.encode(block, pieces, chunk, turn_ref[0], seed_ref, sent_ref)

    messages = [message.halves(payloads)] if received else []
    sent = for_each_block(
        kernel,
        layout,
        config or Config(),
        [scalar(chunk), scalar(turn), seed, order, rows, *messages],
        shape_like((layout.payload_bytes // 2,), jnp.uint16, rows),
    )
    return message.as_bytes(sent)
