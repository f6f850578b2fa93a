"""Mosaic TPU kernels of all operations; see `pallas_kernels.operations`."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._mosaic_tpu import launch, message, rows, transfers, words
from pallas_kernels._mosaic_tpu.blocks import Block, Shape, level_table
from pallas_kernels._mosaic_tpu.launch import IN_MEMORY
from pallas_kernels._mosaic_tpu.vectors import F32, HALVES, LANES, PLACES, U32, VECTOR, lane_of_places
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, LocalRows, Places
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.rows import l2_norm
from pallas_kernels.compat import shape_like

_BLOCKS_OF_STEP = 8  # of the statistics


def statistics(values: Array) -> Array:
    """Compute the norm of every row."""
    num_rows = values.shape[0]
    lines = transfers.as_lines(values)
    count = -(-num_rows // PLACES)  # vectors of 128 norms
    of_step = min(_BLOCKS_OF_STEP, count)
    block = (of_step * PLACES * lines.shape[0] // num_rows, *lines.shape[1:])

    def kernel(step, lines_ref, norms_ref, values_ref):
        of_block = lines_ref.shape[0] // of_step
        for index in range(of_step):
            transfers.load_values(lines_ref.at[pl.ds(index * of_block, of_block)], values_ref)
            norms_ref[index : index + 1, :] = l2_norm(values_ref[...], axis=0)[None]

    norms = launch.launch(
        kernel,
        -(-count // of_step),
        [],
        [(lines, pl.BlockSpec(block, lambda step: (step, *(0 for _ in block[1:]))))],
        shape_like((count, LANES), F32, values),
        pl.BlockSpec((of_step, LANES), lambda step: (step, 0)),
        [pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32)],
        name="statistics",
    )
    return norms.reshape(-1)[:num_rows]


def hop(payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout) -> Array:
    """Encode the sum of received and local rows."""
    shape, received = Shape(layout), payloads.shape[0]
    message_lines = words.num_lines(layout)

    def kernel(step, numbers_ref, starts_ref, *refs):
        *gathered, table_ref = refs[:4]
        messages = refs[4 : 4 + bool(received)]
        sent_ref, *scratch = refs[4 + bool(received) :]
        _, values_ref, planes_ref, _ = scratch
        pl.when(step == 0)(lambda: words.clear(sent_ref))
        block = Block.load(shape, numbers_ref[0], step, starts_ref, table_ref)
        seed = numbers_ref[2].astype(U32), numbers_ref[3].astype(U32)

        def of_bits(bits: int) -> None:
            _sum(block, bits, shape, step, gathered, messages, scratch)
            planes = planes_ref.at[:bits]
            rows.encode(block, values_ref, numbers_ref[1], seed, planes, sent_ref)
            message.merge_planes(block, planes, sent_ref)

        _for_width(block, of_bits)
        _finish(shape, step, scratch)

    operands = [*_gathered(local, shape), _table(layout)]
    if received:
        operands.append((words.as_lines(payloads, layout), pl.BlockSpec(memory_space=pltpu.VMEM)))
    sent = launch.launch(
        kernel,
        shape.blocks,
        launch.numbers(chunk, turn, local.seed, local.places),
        operands,
        shape_like((message_lines, LANES), U32, local.rows),
        pl.BlockSpec(memory_space=pltpu.VMEM),
        _scratch(layout, local.rows.dtype),
        name="hop" if received else "compress",
        vector_bytes=8 * LANES * message_lines * (received + 1),
    )
    return words.as_message(sent, layout)


def decompress_accumulate(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> Array:
    """Sum received and local rows."""
    shape = Shape(layout)
    message_lines = words.num_lines(layout)

    def kernel(step, numbers_ref, starts_ref, *refs):
        *gathered, table_ref, messages_ref, sums_ref = refs[:6]
        *scratch, result_ref, result_semaphore = refs[6:]
        block = Block.load(shape, numbers_ref[0], step, starts_ref, table_ref)

        def of_bits(bits: int) -> None:
            _sum(block, bits, shape, step, gathered, [messages_ref], scratch)

        _for_width(block, of_bits)
        transfers.store_values_in_order(scratch[1], result_ref)
        used = HALVES * min(shape.rows, PLACES)
        copy = pltpu.make_async_copy(
            result_ref.at[pl.ds(0, used)],
            sums_ref.at[pl.ds(HALVES * block.first, used)],
            result_semaphore,
        )
        copy.start()
        copy.wait()
        _finish(shape, step, scratch)

    sums = launch.launch(
        kernel,
        shape.blocks,
        launch.numbers(chunk, 0, local.seed, local.places),
        [
            *_gathered(local, shape),
            _table(layout),
            (words.as_lines(payloads, layout), pl.BlockSpec(memory_space=pltpu.VMEM)),
        ],
        shape_like((HALVES * shape.rows, LANES), F32, local.rows),
        IN_MEMORY,
        [
            *_scratch(layout, local.rows.dtype),
            pltpu.VMEM((HALVES * PLACES, LANES), F32),
            pltpu.SemaphoreType.DMA,
        ],
        name="decompress_accumulate",
        vector_bytes=8 * LANES * message_lines * len(payloads),
    )
    return transfers.as_rows(sums)


def decompress(payloads: Array, places: Places, *, layout: Layout) -> Array:
    """Decode the messages of all chunks to rows in their original order."""
    shape, message_lines = Shape(layout), words.num_lines(layout)
    steps, lanes = layout.num_chunks * shape.blocks, shape.lanes

    def kernel(step, starts_ref, own_order, last_order, table_ref, message_ref, *refs):
        lines_ref, staged_ref, values_ref, planes_ref, semaphore = refs
        chunk = step // shape.blocks
        block = Block.load(shape, chunk, step - chunk * shape.blocks, starts_ref, table_ref)

        def scatter(order_ref) -> None:
            transfers.scatter(order_ref, staged_ref, lines_ref, semaphore, lanes)

        def wait() -> None:
            transfers.wait(staged_ref, semaphore, lanes)

        def of_bits(bits: int) -> None:
            # The rows of the block before travel while this one is computed. In the first step,
            # what the memory holds goes where the next step writes.
            scatter(last_order)
            planes = planes_ref.at[:bits]
            message.load_planes(block, message_ref.at[0], planes)
            rows.add_decoded(block, message_ref.at[0], planes, values_ref)

        _for_width(block, of_bits)
        wait()
        transfers.store_values(values_ref, staged_ref)

        @pl.when(step == steps - 1)
        def _() -> None:
            scatter(own_order)
            wait()

    order = shape.order_of_blocks(places.order)
    lines = launch.launch(
        kernel,
        steps,
        [places.starts.reshape(-1)],
        [
            (order, _order_spec(lambda step, *_: step)),
            (order, _order_spec(lambda step, *_: jnp.maximum(step - 1, 0))),
            _table(layout),
            (
                words.as_lines(payloads, layout),
                pl.BlockSpec((1, message_lines, LANES), lambda step, *_: (step // shape.blocks, 0, 0)),
            ),
        ],
        shape_like((HALVES * layout.num_rows, LANES), F32, payloads),
        IN_MEMORY,
        _scratch(layout, jnp.dtype(F32)),
        name="decompress",
        vector_bytes=8 * LANES * message_lines,
    )
    return transfers.as_rows(lines)


def _sum(block: Block, bits: int, shape: Shape, step: Array, gathered, messages, scratch):
    """Sum the local rows of a block and received messages, and start to gather the next block."""
    first_order, next_order, lines_ref = gathered
    staged_ref, values_ref, planes_ref, semaphore = scratch

    def start(order_ref, lanes: Iterable) -> None:
        transfers.gather(order_ref, lines_ref, staged_ref, semaphore, lanes)

    @pl.when(step == 0)
    def _() -> None:
        count = len(shape.lanes)
        lax.fori_loop(0, count, lambda i, _: start(first_order, [lane_of_places(i)]), None)

    transfers.wait(staged_ref, semaphore, shape.lanes)
    transfers.load_values(staged_ref, values_ref)
    for message_ref in messages:

        def add(index: Index, _: None) -> None:
            message.load_planes(block, message_ref.at[index], planes_ref.at[:bits])
            rows.add_decoded(
                block, message_ref.at[index], planes_ref.at[:bits], values_ref, values_ref
            )

        if message_ref.shape[0] == 1:
            add(0, None)
        else:
            lax.fori_loop(0, message_ref.shape[0], add, None)
    start(next_order, shape.lanes)


def _finish(shape: Shape, step: Array, scratch) -> None:
    """Wait for the rows that the last step gathered."""
    staged_ref, _, _, semaphore = scratch
    pl.when(step == shape.blocks - 1)(lambda: transfers.wait(staged_ref, semaphore, shape.lanes))


def _for_width(block: Block, of_bits: Callable[[int], None]) -> None:
    """Run the code for blocks of up to 8 bits, which nearly all are, or that for wider ones."""
    if len(_bits(block.layout)) == 1:
        of_bits(8)
        return
    wide = block.has_wider(8)
    pl.when(~wide)(lambda: of_bits(8))
    pl.when(wide)(lambda: of_bits(16))


def _bits(layout: Layout) -> tuple[int, ...]:
    """Return the bits of codes that there is code for."""
    return (8,) if max(layout.allocation.widths) <= 8 else (8, 16)


def _gathered(local: LocalRows, shape: Shape) -> list[tuple[Array, pl.BlockSpec]]:
    """Return the rows of the first block of the chunk, those of the next one, and all rows."""
    order = shape.order_of_blocks(local.places.order)

    def of_block(block: Callable) -> tuple[Array, pl.BlockSpec]:
        return order, _order_spec(lambda step, numbers, _: numbers[0] * shape.blocks + block(step))

    return [
        of_block(lambda step: 0),
        of_block(lambda step: jnp.minimum(step + 1, shape.blocks - 1)),
        (transfers.as_lines(local.rows), IN_MEMORY),
    ]


def _order_spec(block: Callable) -> pl.BlockSpec:
    return pl.BlockSpec(
        (1, 1, PLACES), lambda *args: (block(*args), 0, 0), memory_space=pltpu.SMEM
    )


def _table(layout: Layout) -> tuple[Array, pl.BlockSpec]:
    return jnp.asarray(level_table(layout)), pl.BlockSpec(memory_space=pltpu.VMEM)


def _scratch(layout: Layout, dtype: jnp.dtype) -> list[Any]:
    """Return memory for rows that travel, the values of a block, its planes, and a semaphore."""
    return [
        transfers.staging(dtype),
        pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32),
        pltpu.VMEM((_bits(layout)[-1], *VECTOR), U32),
        pltpu.SemaphoreType.DMA,
    ]
