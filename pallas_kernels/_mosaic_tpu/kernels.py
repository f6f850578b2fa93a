"""Mosaic TPU kernels of the operations on rows; see `pallas_kernels.operations`.

A step of a kernel is a block of 128 places. While one is computed, the rows of the next one travel
to vector memory, or those of the last one from it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._jax.compat import shape_like
from pallas_kernels._mosaic_tpu import launch, message, rows, transfers, words
from pallas_kernels._mosaic_tpu.blocks import Block, Shape, level_table
from pallas_kernels._mosaic_tpu.launch import AS_SCALARS, IN_MEMORY, IN_VECTOR_MEMORY, Operand
from pallas_kernels._mosaic_tpu.vectors import (
    F32,
    HALVES,
    LANES,
    PLACES,
    U32,
    VECTOR,
    lane_of_places,
    places_of_lanes,
    take_lanes,
)
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, LocalRows, Places
from pallas_kernels.codec.layout import Layout

# Lanes whose copies start before a block is decoded. The compiler does not spread copies among the
# arithmetic that they are next to, and takes fewest bundles for two parts in two places.
_EARLY = 64


class Memory(NamedTuple):
    """Memory that all steps of a kernel share, as refs or as its description."""

    staged: Any  # rows that travel
    values: Any  # of a block, float32 [256, 128]
    planes: Any  # of a block, uint32 [8 or 16, 8, 128]
    messages: Any  # that arrived, uint32 [count, lines, 128]
    semaphore: Any  # of the rows
    others: Any  # semaphore of all else


class GatheredRows(NamedTuple):
    """Local rows of a chunk: refs, or operands."""

    first: Any  # where the rows of the first block lie
    next: Any  # where the rows of the block after that of the step lie
    lines: Any  # all rows


def hop(payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout) -> Array:
    """Encode the sum of received and local rows."""
    shape, received = Shape(layout), payloads.shape[0]
    gathered = _gathered(local, shape)

    def kernel(step, chunk_ref, turn_ref, seed_ref, starts_ref, *refs):
        rows_refs, (table_ref, received_ref, result_ref) = GatheredRows(*refs[:3]), refs[3:6]
        memory, sent_ref = Memory(*refs[6:-1]), refs[-1]

        @pl.when(step == 0)
        def _() -> None:
            words.clear(sent_ref)
            _receive(received_ref, received, memory, layout)

        block = Block.load(shape, chunk_ref[0], step, starts_ref, table_ref)
        seed = seed_ref[0].astype(U32), seed_ref[1].astype(U32)

        def of_bits(bits: int) -> None:
            planes = memory.planes.at[:bits]
            _sum(block, step, rows_refs, received, memory._replace(planes=planes))
            rows.encode(block, memory.values, turn_ref[0], seed, planes, sent_ref)
            _gather(rows_refs, memory, shape.lanes[_EARLY:])
            message.merge_planes(block, planes, sent_ref)

        _for_width(block, of_bits)
        _finish(shape, step, memory)

        @pl.when(step == shape.blocks - 1)
        def _() -> None:
            transfers.run(words.copy_out(sent_ref, result_ref, memory.others))

    sent = launch.launch(
        kernel,
        shape.blocks,
        [
            *launch.scalars(chunk, turn, local.seed, local.places),
            *gathered,
            _table(layout),
            # An operand has to have elements.
            _messages(payloads, layout) if received else (_table(layout)[0], IN_MEMORY),
        ],
        (shape_like(words.result_shape(layout), U32, local.rows), IN_MEMORY),
        [*_memory(layout, local.rows.dtype, received), words.memory(layout)],
        name="hop" if received else "compress",
    )
    return words.as_message(sent, layout)


def decompress_accumulate(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> Array:
    """Sum received and local rows."""
    return _sums(payloads, local, chunk, layout, with_scales=False)[0]


def scaled_sums(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> tuple[Array, Array]:
    """Sum received and local rows, and compute the scales of the sums."""
    sums, scales = _sums(payloads, local, chunk, layout, with_scales=True)
    return sums, words.as_message(scales, layout)


def _sums(
    payloads: Array, local: LocalRows, chunk: Index, layout: Layout, *, with_scales: bool
) -> list[Array]:
    """Return sums, and a message of their scales if it is asked for."""
    shape, received, results = Shape(layout), payloads.shape[0], 1 + with_scales

    def kernel(step, chunk_ref, _turn, _seed, starts_ref, *refs):
        gathered, (table_ref, received_ref, sums_ref) = GatheredRows(*refs[:3]), refs[3:6]
        memory, (result_ref, *scales_ref) = Memory(*refs[5 + results : -results]), refs[-results:]

        @pl.when(step == 0)
        def _() -> None:
            _receive(received_ref, received, memory, layout)
            for ref in scales_ref:
                words.clear(ref)

        block = Block.load(shape, chunk_ref[0], step, starts_ref, table_ref)

        def of_bits(bits: int) -> None:
            planes = memory.planes.at[:bits]
            _sum(block, step, gathered, received, memory._replace(planes=planes))
            _gather(gathered, memory, shape.lanes[_EARLY:])

        _for_width(block, of_bits)
        for ref in scales_ref:
            message.merge_scales(block, rows.quantize_scales(layout, memory.values), ref)
        transfers.store_values_in_order(memory.values, result_ref)
        used = HALVES * min(shape.rows, PLACES)
        lines_ref = sums_ref.at[pl.ds(HALVES * block.first, used)]
        transfers.run(
            pltpu.make_async_copy(result_ref.at[pl.ds(0, used)], lines_ref, memory.others)
        )
        _finish(shape, step, memory)

        @pl.when(step == shape.blocks - 1)
        def _() -> None:
            for ref, scales_result_ref in zip(scales_ref, refs[6 : 5 + results], strict=True):
                transfers.run(words.copy_out(ref, scales_result_ref, memory.others))

    of_scales = (shape_like(words.result_shape(layout), U32, local.rows), IN_MEMORY)
    sums, *scales = launch.launch_several(
        kernel,
        shape.blocks,
        [
            *launch.scalars(chunk, 0, local.seed, local.places),
            *_gathered(local, shape),
            _table(layout),
            _messages(payloads, layout),
        ],
        [
            (shape_like((HALVES * shape.rows, LANES), F32, local.rows), IN_MEMORY),
            *[of_scales] * with_scales,
        ],
        [
            *_memory(layout, local.rows.dtype, received),
            pltpu.VMEM((HALVES * PLACES, LANES), F32),
            *[words.memory(layout)] * with_scales,
        ],
        name="scaled_sums" if with_scales else "decompress_accumulate",
    )
    return [transfers.as_rows(sums), *scales]


def decompress(payloads: Array, places: Places, *, layout: Layout) -> Array:
    """Decode the messages of all chunks to rows in their original order."""
    return _decompress(payloads, places, None, layout)


def decompress_sums(payloads: Array, places: Places, table: Array, *, layout: Layout) -> Array:
    """Decode messages whose scales are in the order of another table."""
    return _decompress(payloads, places, table, layout)


def _decompress(payloads: Array, places: Places, table: Array | None, layout: Layout) -> Array:
    """Decode messages; `table` has the place of the scales of every row, which may be its own."""
    shape = Shape(layout)
    steps, lanes = layout.num_chunks * shape.blocks, shape.lanes

    def kernel(step, starts_ref, *refs):
        own_order, last_order, table_ref, received_ref, *scale_places, lines_ref = refs[:-6]
        memory = Memory(*refs[-6:])
        message_ref = memory.messages.at[0]
        chunk = step // shape.blocks
        index = step - chunk * shape.blocks
        block = Block.load(shape, chunk, index, starts_ref, table_ref)

        def scatter(order_ref, lanes: Iterable) -> None:
            transfers.scatter(order_ref, memory.staged, lines_ref, memory.semaphore, lanes)

        def wait() -> None:
            transfers.wait(memory.staged, memory.semaphore, lanes)

        @pl.when(index == 0)
        def _() -> None:
            transfers.run(words.copy_in(received_ref, chunk, message_ref, layout, memory.others))

        def scales_of(block: Block) -> message.Scales:
            if table is None:
                return message.load_scales(layout, block.first, message_ref)
            in_order = jnp.broadcast_to(scale_places[0][0], VECTOR)
            return message.find_scales(layout, take_lanes(in_order, places_of_lanes()), message_ref)

        def of_bits(bits: int) -> None:
            planes = memory.planes.at[:bits]
            message.load_planes(block, message_ref, planes)
            # The rows of the block before travel while this one is computed. In the first step,
            # what the memory holds goes where the next step writes.
            scatter(last_order, lanes)
            rows.add_decoded(block, scales_of(block), planes, memory.values)
            wait()
            transfers.store_values(memory.values, memory.staged)

        _for_width(block, of_bits)

        @pl.when(step == steps - 1)
        def _() -> None:
            _for_each_lane(shape, functools.partial(scatter, own_order))
            wait()

    order = shape.order_of_blocks(places.order, transfers.lines_of_row(F32))
    in_vectors = pl.BlockSpec((1, 1, PLACES), lambda step, *_: (step, 0, 0))
    lines = launch.launch(
        kernel,
        steps,
        [
            (places.starts.reshape(-1), AS_SCALARS),
            (order, _order_spec(lambda step, *_: step)),
            (order, _order_spec(lambda step, *_: jnp.maximum(step - 1, 0))),
            _table(layout),
            _messages(payloads, layout),
            *([] if table is None else [(shape.order_of_blocks(table, 1), in_vectors)]),
        ],
        (shape_like((HALVES * layout.num_rows, LANES), F32, payloads), IN_MEMORY),
        _memory(layout, F32, 1),
        name="decompress" if table is None else "decompress_sums",
    )
    return transfers.as_rows(lines)


def _receive(received_ref, received: int, memory: Memory, layout: Layout) -> None:
    """Copy the messages that arrived to vector memory."""
    for index in range(received):
        lines_ref = memory.messages.at[index]
        transfers.run(words.copy_in(received_ref, index, lines_ref, layout, memory.others))


def _sum(block: Block, step: Array, gathered: GatheredRows, received: int, memory: Memory) -> None:
    """Sum the local rows of a block, which are on their way, and received messages.

    It starts to gather the first lanes of the next block. The caller starts the others.
    """
    shape = Shape(block.layout)
    of_first = gathered._replace(next=gathered.first)
    start = functools.partial(_gather, of_first, memory)
    pl.when(step == 0)(lambda: _for_each_lane(shape, start))
    transfers.wait(memory.staged, memory.semaphore, shape.lanes)
    transfers.load_values(memory.staged, memory.values)
    _gather(gathered, memory, shape.lanes[:_EARLY])

    def add(index: Index, _: None) -> None:
        message_ref = memory.messages.at[index]
        message.load_planes(block, message_ref, memory.planes)
        scales = message.load_scales(block.layout, block.first, message_ref)
        rows.add_decoded(block, scales, memory.planes, memory.values, memory.values)

    if received == 1:
        add(0, None)
    elif received:
        lax.fori_loop(0, received, add, None)


def _gather(gathered: GatheredRows, memory: Memory, lanes: Iterable) -> None:
    """Start to gather the rows of the next block."""
    transfers.gather(gathered.next, gathered.lines, memory.staged, memory.semaphore, lanes)


def _finish(shape: Shape, step: Array, memory: Memory) -> None:
    """Wait for the rows that the last step gathered."""

    @pl.when(step == shape.blocks - 1)
    def _() -> None:
        transfers.wait(memory.staged, memory.semaphore, shape.lanes)


def _for_each_lane(shape: Shape, start: Callable[[list[Array]], None]) -> None:
    """Start copies in a loop: less code, for steps that are rare."""
    lax.fori_loop(0, len(shape.lanes), lambda place, _: start([lane_of_places(place)]), None)


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


def _gathered(local: LocalRows, shape: Shape) -> GatheredRows:
    order = shape.order_of_blocks(local.places.order, transfers.lines_of_row(local.rows.dtype))

    def of_block(block: Callable) -> Operand:
        return order, _order_spec(lambda step, chunk, *_: chunk[0] * shape.blocks + block(step))

    return GatheredRows(
        of_block(lambda step: 0),
        of_block(lambda step: jnp.minimum(step + 1, shape.blocks - 1)),
        (transfers.as_lines(local.rows), IN_MEMORY),
    )


def _order_spec(block: Callable) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, PLACES), lambda *args: (block(*args), 0, 0), memory_space=pltpu.SMEM)


def _table(layout: Layout) -> Operand:
    return jnp.asarray(level_table(layout)), IN_VECTOR_MEMORY


def _messages(payloads: Array, layout: Layout) -> Operand:
    return words.as_operand(payloads, layout), IN_MEMORY


def _memory(layout: Layout, dtype: Any, received: int) -> Memory:
    return Memory(
        transfers.staging(dtype),
        pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32),
        pltpu.VMEM((_bits(layout)[-1], *VECTOR), U32),
        words.memory(layout, max(received, 1)) if received else pltpu.VMEM((1, *VECTOR), U32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
    )
