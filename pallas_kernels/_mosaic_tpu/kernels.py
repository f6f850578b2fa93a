"""Mosaic TPU kernels of all operations; see `pallas_kernels.operations`."""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._mosaic_tpu import launch, rows, transfers, words
from pallas_kernels._mosaic_tpu.blocks import Block, Shape, level_table
from pallas_kernels._mosaic_tpu.launch import IN_MEMORY
from pallas_kernels._mosaic_tpu.vectors import F32, LANES, PLACES, U32
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, LocalRows, Places
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.rows import l2_norm
from pallas_kernels.compat import shape_like

_BLOCKS_OF_STEP = 8  # of the statistics
_PARTS = 16  # in which the rows of the next block are gathered


def statistics(values: Array) -> Array:
    """Compute the norm of every row."""
    num_rows = values.shape[0]
    count = -(-num_rows // PLACES)  # lines of 128 norms
    of_step = min(_BLOCKS_OF_STEP, count)

    def kernel(step, rows_ref, norms_ref, values_ref):
        for index in range(of_step):
            part = pl.ds(index * PLACES, PLACES)
            for half in range(transfers.HALVES):
                lines = rows_ref[part, half * LANES : (half + 1) * LANES]
                values_ref[half * LANES : (half + 1) * LANES, :] = lines.astype(F32).T
            norms_ref[index : index + 1, :] = l2_norm(values_ref[...], axis=0)[None]

    norms = launch.launch(
        kernel,
        -(-count // of_step),
        [],
        [(values, pl.BlockSpec((of_step * PLACES, SUPER_GROUP_SIZE), lambda step: (step, 0)))],
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
        sent_ref, staged_ref, values_ref, semaphores = refs[4 + bool(received) :]
        pl.when(step == 0)(lambda: words.clear(sent_ref))
        block = Block.load(shape, numbers_ref[0], step, starts_ref, table_ref)
        seed = numbers_ref[2].astype(U32), numbers_ref[3].astype(U32)

        def of_bits(bits: int) -> None:
            parts = _sum(
                block, bits, shape, step, gathered, messages, staged_ref, values_ref, semaphores
            )
            rows.encode(block, bits, values_ref, numbers_ref[1], seed, sent_ref, parts)

        _for_width(block, of_bits)
        _finish(shape, step, staged_ref, semaphores)

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
        _scratch(local),
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
        *gathered, table_ref, messages_ref, sums_ref, staged_ref, values_ref, semaphores = refs[:-2]
        result_ref, result_semaphore = refs[-2:]
        block = Block.load(shape, numbers_ref[0], step, starts_ref, table_ref)

        def of_bits(bits: int) -> None:
            parts = _sum(
                block, bits, shape, step, gathered, [messages_ref],
                staged_ref, values_ref, semaphores,
            )
            for start in parts:
                start()

        _for_width(block, of_bits)
        transfers.store_values_in_order(values_ref, result_ref)
        used = transfers.HALVES * min(shape.rows, PLACES)
        copy = pltpu.make_async_copy(
            result_ref.at[pl.ds(0, used)],
            sums_ref.at[pl.ds(transfers.HALVES * block.first, used)],
            result_semaphore,
        )
        copy.start()
        copy.wait()
        _finish(shape, step, staged_ref, semaphores)

    sums = launch.launch(
        kernel,
        shape.blocks,
        launch.numbers(chunk, 0, local.seed, local.places),
        [
            *_gathered(local, shape),
            _table(layout),
            (words.as_lines(payloads, layout), pl.BlockSpec(memory_space=pltpu.VMEM)),
        ],
        shape_like((transfers.HALVES * shape.rows, LANES), F32, local.rows),
        IN_MEMORY,
        [
            *_scratch(local),
            pltpu.VMEM((transfers.HALVES * PLACES, LANES), F32),
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
        lines_ref, values_ref, staged_ref, semaphores = refs
        slot = lax.rem(step, 2)
        chunk = step // shape.blocks
        block = Block.load(shape, chunk, step - chunk * shape.blocks, starts_ref, table_ref)

        def of_bits(bits: int) -> None:
            # The rows of the block before travel while this one is computed.
            rows.add_decoded(block, bits, message_ref.at[0], values_ref)

        def scatter(order_ref, slot: Array) -> None:
            transfers.scatter(
                order_ref, staged_ref.at[slot], lines_ref, semaphores.at[slot], lanes
            )

        def wait(slot: Array) -> None:
            transfers.wait(staged_ref.at[slot], semaphores.at[slot], lanes)

        pl.when(step > 0)(lambda: scatter(last_order, 1 - slot))
        _for_width(block, of_bits)
        pl.when(step > 1)(lambda: wait(slot))
        transfers.store_values(values_ref, staged_ref.at[slot])

        @pl.when(step == steps - 1)
        def _() -> None:
            scatter(own_order, slot)
            pl.when(step > 0)(lambda: wait(1 - slot))
            wait(slot)

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
        shape_like((transfers.HALVES * layout.num_rows, LANES), F32, payloads),
        IN_MEMORY,
        [
            pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32),
            transfers.staging(jnp.dtype(F32)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        name="decompress",
        vector_bytes=8 * LANES * message_lines,
    )
    return transfers.as_rows(lines)


def _sum(block, bits, shape, step, gathered, messages, staged_ref, values_ref, semaphores):
    """Sum the local rows of a block and received messages.

    Returns:
      Functions that start to gather a part of the next block each, in any order.
    """
    first_order, next_order, lines_ref = gathered
    slot = lax.rem(step, 2)

    def start(order_ref, slot: Array | int, lanes: Iterable) -> None:
        transfers.gather(order_ref, lines_ref, staged_ref.at[slot], semaphores.at[slot], lanes)

    @pl.when(step == 0)
    def _() -> None:
        lax.fori_loop(0, len(shape.lanes), lambda i, _: start(first_order, 0, [shape.lane(i)]), None)

    transfers.wait(staged_ref.at[slot], semaphores.at[slot], shape.lanes)
    transfers.load_values(staged_ref.at[slot], values_ref)
    for message_ref in messages:

        def add(index: Index, _: None) -> None:
            rows.add_decoded(block, bits, message_ref.at[index], values_ref, values_ref)

        if message_ref.shape[0] == 1:
            add(0, None)
        else:
            lax.fori_loop(0, message_ref.shape[0], add, None)
    return [
        functools.partial(start, next_order, 1 - slot, shape.lanes[part::_PARTS])
        for part in range(_PARTS)
    ]


def _finish(shape: Shape, step: Array, staged_ref, semaphores) -> None:
    """Wait for the rows that the last step gathered."""
    slot = 1 - lax.rem(step, 2)

    @pl.when(step == shape.blocks - 1)
    def _() -> None:
        transfers.wait(staged_ref.at[slot], semaphores.at[slot], shape.lanes)


def _for_width(block: Block, of_bits: Callable[[int], None]) -> None:
    """Run the code for blocks of up to 8 bits, which nearly all are, or that for wider ones."""
    if max(block.layout.allocation.widths) <= 8:
        of_bits(8)
        return
    wide = block.has_wider(8)
    pl.when(~wide)(lambda: of_bits(8))
    pl.when(wide)(lambda: of_bits(16))


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


def _scratch(local: LocalRows) -> list:
    dtype = jnp.bfloat16 if local.rows.dtype == jnp.bfloat16 else jnp.float32
    return [
        transfers.staging(jnp.dtype(dtype)),
        pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32),
        pltpu.SemaphoreType.DMA((2,)),
    ]
