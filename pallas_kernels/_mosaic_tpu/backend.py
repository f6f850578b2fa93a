"""The backend of the Mosaic TPU kernels, and the kernels of the operations on rows.

A step of a kernel is a block of 128 places. While one is computed, the rows of the next one travel
to vector memory, or those of the last one from it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._jax.compat import override, shape_like
from pallas_kernels._mosaic_tpu import launch, message, rows, transfers, widths, words
from pallas_kernels._mosaic_tpu.blocks import (
    Block,
    level_table,
    num_blocks,
    order_of_blocks,
    used_lanes,
)
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
from pallas_kernels.backend import Backend, Operation, takes_messages
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, Layout, LocalRows, Places
from pallas_kernels.pallas_backend import PallasBackend

# TPUs that kernels compile for, by the names that JAX gives them: v5e, v5p and v6e.
_KINDS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
# Operations whose kernels hold the messages of all chunks one by one. Others hold all at once.
_ONE_BY_ONE = (Backend.energies, Backend.decompress, Backend.decompress_sums)
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
    name = "hop" if len(payloads) else "compress"
    [sent] = _reduce(payloads, local, chunk, turn, layout, name)
    return words.as_message(sent, layout)


def decompress_accumulate(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> Array:
    """Sum received and local rows."""
    [sums] = _reduce(payloads, local, chunk, 0, layout, "decompress_accumulate")
    return sums.reshape(-1, SUPER_GROUP_SIZE)


def scaled_sums(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> tuple[Array, Array]:
    """Sum received and local rows, and compute a message of the scales of the sums."""
    sums, scales = _reduce(payloads, local, chunk, 0, layout, "scaled_sums")
    return sums.reshape(-1, SUPER_GROUP_SIZE), words.as_message(scales, layout)


def _reduce(
    payloads: Array, local: LocalRows, chunk: Index, turn: Index, layout: Layout, name: str
) -> list[Array]:
    """Sum received and local rows: return the sums, a message of them or of their scales, or both.

    A message of several blocks is made in vector memory.
    """
    received, blocks, lanes = payloads.shape[0], num_blocks(layout), used_lanes(layout)
    encodes = name in ("hop", "compress")
    has_sums, has_message = not encodes, encodes or name == "scaled_sums"
    count = has_sums + has_message

    def kernel(step, chunk_ref, turn_ref, seed_ref, starts_ref, *refs):
        gathered, (table_ref, received_ref) = GatheredRows(*refs[:3]), refs[3:5]
        results, made = refs[5 : 5 + count], refs[-count:]
        memory = Memory(*refs[5 + count : -count])

        @pl.when(step == 0)
        def _() -> None:
            if has_message:
                words.clear(made[-1])
            for index in range(received):
                lines_ref = memory.messages.at[index]
                transfers.run(words.copy_in(received_ref, index, lines_ref, layout, memory.others))

        block = Block.load(layout, chunk_ref[0], step, starts_ref, table_ref)
        seed = seed_ref[0].astype(U32), seed_ref[1].astype(U32)

        def of_bits(bits: int) -> None:
            planes = memory.planes.at[:bits]
            _sum(block, step, gathered, received, memory._replace(planes=planes))
            if encodes:
                rows.encode(block, memory.values, turn_ref[0], seed, planes, made[-1])
            _gather(gathered, memory, lanes[_EARLY:])
            if encodes:
                message.merge_planes(block, planes, made[-1])

        _for_width(block, of_bits)
        if has_sums:
            if has_message:
                scales = rows.as_scales(*rows.quantize_scales(layout, memory.values))
                message.merge_scales(block, scales, made[-1])
            transfers.store_values_in_order(memory.values, made[0])
            used = HALVES * min(layout.rows_per_chunk, PLACES)
            source = made[0].at[pl.ds(0, used)]
            target = results[0].at[pl.ds(HALVES * block.first, used)]
            transfers.run(pltpu.make_async_copy(source, target, memory.others))

        @pl.when(step == blocks - 1)
        def _() -> None:
            # The rows that the last step gathered.
            transfers.wait(memory.staged, memory.semaphore, lanes)
            if has_message:
                transfers.run(words.copy_out(made[-1], results[-1], memory.others))

    of_sums = (shape_like((HALVES * layout.rows_per_chunk, LANES), F32, local.rows), IN_MEMORY)
    of_message = (shape_like(words.result_shape(layout), U32, local.rows), IN_MEMORY)
    return launch.launch(
        kernel,
        blocks,
        [
            *launch.scalars(chunk, turn, local.seed, local.places),
            *_gathered(local, layout),
            _table(layout),
            # An operand has to have elements.
            _messages(payloads, layout) if received else (_table(layout)[0], IN_MEMORY),
        ],
        [*[of_sums] * has_sums, *[of_message] * has_message],
        [
            *_memory(layout, local.rows.dtype, received),
            *[pltpu.VMEM((HALVES * PLACES, LANES), F32)] * has_sums,
            *[words.memory(layout)] * has_message,
        ],
        name=name,
    )


def decompress(
    payloads: Array, places: Places, table: Array | None = None, *, layout: Layout
) -> Array:
    """Decode the messages of all chunks; their scales may be in the order of another table."""
    blocks, lanes = num_blocks(layout), used_lanes(layout)
    steps = layout.num_chunks * blocks

    def kernel(step, starts_ref, *refs):
        own_order, last_order, table_ref, received_ref, *scale_places, lines_ref = refs[:-6]
        memory = Memory(*refs[-6:])
        message_ref = memory.messages.at[0]
        chunk = step // blocks
        index = step - chunk * blocks
        block = Block.load(layout, chunk, index, starts_ref, table_ref)

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
            _for_each_lane(layout, functools.partial(scatter, own_order))
            wait()

    order = order_of_blocks(layout, places.order, transfers.lines_of_row(F32))
    in_vectors = pl.BlockSpec((1, 1, PLACES), lambda step, *_: (step, 0, 0))
    [lines] = launch.launch(
        kernel,
        steps,
        [
            (places.starts.reshape(-1), AS_SCALARS),
            (order, _order_spec(lambda step, *_: step)),
            (order, _order_spec(lambda step, *_: jnp.maximum(step - 1, 0))),
            _table(layout),
            _messages(payloads, layout),
            *([] if table is None else [(order_of_blocks(layout, table, 1), in_vectors)]),
        ],
        [(shape_like((HALVES * layout.num_rows, LANES), F32, payloads), IN_MEMORY)],
        _memory(layout, F32, 1),
        name="decompress" if table is None else "decompress_sums",
    )
    return lines.reshape(-1, SUPER_GROUP_SIZE)


def _sum(block: Block, step: Array, gathered: GatheredRows, received: int, memory: Memory) -> None:
    """Sum the local rows of a block, which are on their way, and received messages.

    It starts to gather the first lanes of the next block. The caller starts the others.
    """
    lanes = used_lanes(block.layout)
    of_first = gathered._replace(next=gathered.first)
    start = functools.partial(_gather, of_first, memory)
    pl.when(step == 0)(lambda: _for_each_lane(block.layout, start))
    transfers.wait(memory.staged, memory.semaphore, lanes)
    transfers.load_values(memory.staged, memory.values)
    _gather(gathered, memory, lanes[:_EARLY])

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


def _for_each_lane(layout: Layout, start: Callable[[list[Array]], None]) -> None:
    """Start copies in a loop: less code, for steps that are rare."""
    count = min(layout.rows_per_chunk, PLACES)
    lax.fori_loop(0, count, lambda place, _: start([lane_of_places(place)]), None)


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


def _gathered(local: LocalRows, layout: Layout) -> GatheredRows:
    blocks, lines = num_blocks(layout), transfers.lines_of_row(local.rows.dtype)
    order = order_of_blocks(layout, local.places.order, lines)

    def of_block(block: Callable) -> Operand:
        return order, _order_spec(lambda step, chunk, *_: chunk[0] * blocks + block(step))

    return GatheredRows(
        of_block(lambda step: 0),
        of_block(lambda step: jnp.minimum(step + 1, blocks - 1)),
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
        words.memory(layout, received) if received else pltpu.VMEM((1, *VECTOR), U32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
    )


class MosaicTpu(PallasBackend):
    """Mosaic kernels for TPUs from v5e on, whose messages are words."""

    name = "mosaic_tpu"
    platform = "tpu"
    message_dtype = jnp.uint32

    statistics = staticmethod(widths.statistics)
    hop = staticmethod(hop)
    decompress_accumulate = staticmethod(decompress_accumulate)
    decompress = staticmethod(decompress)
    solve = staticmethod(widths.solve)
    energies = staticmethod(widths.energies)
    scaled_sums = staticmethod(scaled_sums)
    decompress_sums = staticmethod(decompress)

    @override
    def why_not_on_devices(self) -> str | None:
        if jax.default_backend() != "tpu":
            return "the default devices are not TPUs"
        kinds = {device.device_kind for device in jax.local_devices() if device.platform == "tpu"}
        for unknown in sorted(kinds - set(_KINDS)):
            return f"its kernels are compiled for TPU v5e, v5p and v6e, and this is a {unknown!r}"
        return None

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        reason = super().why_not_for(operation, *arrays, layout=layout)
        if reason or layout is None or not takes_messages(operation):
            return reason
        # A hop also writes a message.
        return words.why_too_large(layout, 1 if operation in _ONE_BY_ONE else len(arrays[0]) + 1)
