"""Triton kernels of all operations; see `pallas_kernels.operations`."""

import functools
import operator

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._jax.compat import shape_like
from pallas_kernels._triton import message, rows
from pallas_kernels._triton.blocks import Blocks, LaunchConfig, launch
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, LocalRows, Places
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.rows import LARGEST_UNIT, inverse_unit


def statistics(values: Array, *, config: LaunchConfig = LaunchConfig()) -> Array:
    """Compute the norm of every row."""
    num_rows = values.shape[0]

    def kernel(rows_ref, norms_ref):
        first = pl.program_id(0) * config.rows
        row = lax.min(first + lax.iota(jnp.int32, config.rows), jnp.int32(num_rows - 1))
        pieces = rows.gather(rows_ref, row)
        # The maximum drops a NaN in Triton. The sum of squares still shows it.
        largest = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, pieces)), axis=1)
        unit = jnp.minimum(largest, LARGEST_UNIT)
        scaled = [piece * inverse_unit(unit)[:, None] for piece in pieces]
        squares = jnp.sum(functools.reduce(operator.add, (s * s for s in scaled)), axis=1)
        norms_ref[row] = unit * jnp.sqrt(squares)

    shape = shape_like((num_rows,), jnp.float32, values)
    return launch(kernel, (config.programs(num_rows),), config, [values], shape)


def hop(
    payloads: Array,
    local: LocalRows,
    chunk: Index,
    turn: Index,
    *,
    layout: Layout,
    config: LaunchConfig = LaunchConfig(),
) -> Array:
    """Encode the sum of received and local rows."""
    received = payloads.shape[0]

    def kernel(block, row, turn_ref, seed_ref, rows_ref, *messages):
        received_ref, sent_ref = messages[0], messages[-1]
        pieces = rows.gather(rows_ref, row)
        if received:
            pieces = rows.add_messages(block, pieces, received_ref, received)
        rows.encode(block, pieces, rows.Noise(turn_ref[0], seed_ref), sent_ref)

    messages = [message.as_units(payloads)] if received else []
    sent = Blocks(layout, config, local.places, chunk).run(
        kernel,
        [turn, local.seed, local.rows, *messages],
        shape_like((layout.payload_bytes // 2,), jnp.uint16, local.rows),
        first=lambda used, *refs: message.pad(layout, used, refs[-1]),
    )
    return message.as_bytes(sent)


def decompress_accumulate(
    payloads: Array,
    local: LocalRows,
    chunk: Index,
    *,
    layout: Layout,
    config: LaunchConfig = LaunchConfig(),
) -> Array:
    """Sum received and local rows."""
    received = payloads.shape[0]

    def kernel(block, row, rows_ref, messages_ref, sums_ref):
        pieces = rows.gather(rows_ref, row)
        pieces = rows.add_messages(block, pieces, messages_ref, received)
        rows.scatter(pieces, sums_ref, block.place)

    return Blocks(layout, config, local.places, chunk).run(
        kernel,
        [local.rows, message.as_units(payloads)],
        shape_like((layout.rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32, local.rows),
    )


def decompress(
    payloads: Array, places: Places, *, layout: Layout, config: LaunchConfig = LaunchConfig()
) -> Array:
    """Decode the messages of all chunks to rows in their original order."""

    def kernel(block, row, messages_ref, rows_ref):
        start = block.chunk * (layout.payload_bytes // 2)
        rows.scatter(rows.decode(block, messages_ref, start), rows_ref, row)

    return Blocks(layout, config, places).run(
        kernel,
        [message.as_units(payloads)],
        shape_like((layout.num_rows, SUPER_GROUP_SIZE), jnp.float32, payloads),
    )
