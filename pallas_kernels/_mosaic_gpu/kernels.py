"""Mosaic GPU kernels of all operations; see `pallas_kernels.operations`."""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._mosaic_gpu import blocks, launch
from pallas_kernels._mosaic_gpu.launch import row_shape
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, LocalRows
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.rows import LARGEST_UNIT
from pallas_kernels.compat import shape_like


def statistics(rows: Array) -> Array:
    """Compute the norm of every row."""
    num_rows = rows.shape[0]
    if num_rows == 1:  # its result could not be stored: JAX takes it for a scalar
        return statistics(jnp.concatenate([rows, rows]))[:1]
    count, programs = launch.blocks_of_rows(num_rows)
    shape = (count, *row_shape(launch.LANES)[1:])

    def kernel(rows_ref, norms_ref):
        first = lax.min(lax.axis_index("block") * count, jnp.int32(num_rows - count))
        pieces = launch.load_rows(shape, rows_ref, first)
        largest = _over_lanes(jnp.max, [jnp.abs(values) for values in pieces], jnp.maximum)
        # As `codec.l2_norm`, of values that several threads hold.
        unit, one = jnp.minimum(largest, LARGEST_UNIT), np.float32(1)
        inverse = jnp.where(unit > np.finfo(np.float32).tiny, one / unit, one)
        inverse = launch.spread(inverse, shape, (0,))
        squares = _over_lanes(jnp.sum, [jnp.square(v * inverse) for v in pieces], operator.add)
        launch.store_column(norms_ref, first, unit * jnp.sqrt(squares))

    pieces_of_rows = rows.reshape(-1, *row_shape(launch.LANES))
    result = shape_like((num_rows,), jnp.float32, rows)
    return launch.launch(kernel, (programs,), [pieces_of_rows], result)


def hop(payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout) -> Array:
    """Encode the sum of received and local rows."""
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

    pieces_of_rows = local.rows.reshape(-1, *row_shape(layout.group_size))
    messages = [payloads] if received else []
    return blocks.for_each_block(
        kernel,
        layout,
        [chunk, turn, local.seed, local.order, pieces_of_rows, *messages],
        shape_like((layout.payload_bytes,), jnp.uint8, local.rows),
        staged=local.rows.dtype,
    )


def decompress_accumulate(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> Array:
    """Sum received and local rows."""
    received = payloads.shape[0]

    def kernel(block, chunk_ref, order_ref, rows_ref, messages_ref, sums_ref):
        chunk = chunk_ref[0]
        pieces = blocks.partial_sum(
            block,
            rows_ref,
            lambda row: order_ref[chunk, block.place + row],
            [messages_ref.at[i] for i in range(received)],
        )
        # Neighbors stay neighbors, so there is nothing to scatter through shared memory.
        launch.store_rows(sums_ref, block.place, pieces)

    row = row_shape(layout.group_size)
    sums = blocks.for_each_block(
        kernel,
        layout,
        [chunk, local.order, local.rows.reshape(-1, *row), payloads],
        shape_like((layout.rows_per_chunk, *row), jnp.float32, local.rows),
        staged=local.rows.dtype,
    )
    return sums.reshape(layout.rows_per_chunk, SUPER_GROUP_SIZE)


def decompress(payloads: Array, order: Array, *, layout: Layout) -> Array:
    """Decode the messages of all chunks to rows in their original order."""

    def kernel(block, order_ref, messages_ref, rows_ref):
        chunk = lax.axis_index("chunk")
        pieces = blocks.decode(block, blocks.receive(block, messages_ref.at[chunk]))
        blocks.scatter(block, pieces, rows_ref, lambda row: order_ref[chunk, block.place + row])

    rows = blocks.for_each_block(
        kernel,
        layout,
        [order, payloads],
        shape_like((layout.num_rows, *row_shape(layout.group_size)), jnp.float32, payloads),
        staged=jnp.float32,
        chunks=layout.num_chunks,
    )
    return rows.reshape(layout.num_rows, SUPER_GROUP_SIZE)


def _over_lanes(reduction: Callable, pieces: list[Array], pairwise: Callable) -> Array:
    return reduction(functools.reduce(pairwise, pieces), axis=1)
