"""Mosaic TPU kernels of what widths follow from: norms of rows, and energies of sums."""

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._jax.compat import shape_like
from pallas_kernels._mosaic_tpu import launch, message, transfers, words
from pallas_kernels._mosaic_tpu.blocks import Shape
from pallas_kernels._mosaic_tpu.vectors import (
    F32,
    I32,
    LANES,
    PLACES,
    iota,
    lane_of_places,
    take_lanes,
)
from pallas_kernels.codec import SUPER_GROUP_SIZE
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.rows import l2_norm

_BLOCKS_OF_STEP = 8  # of the statistics


def statistics(values: Array) -> Array:
    """Compute the norm of every row."""
    num_rows = values.shape[0]
    # Lines of two dimensions, also of bfloat16: pairs of these are words of rows as they are.
    lines = transfers.as_lines(values).reshape(-1, LANES)
    count = -(-num_rows // PLACES)  # vectors of 128 norms
    of_step = min(_BLOCKS_OF_STEP, count)
    block = of_step * PLACES * len(lines) // num_rows, LANES

    def kernel(step, lines_ref, norms_ref, values_ref):
        of_block = lines_ref.shape[0] // of_step
        for index in range(of_step):
            transfers.load_values(lines_ref.at[pl.ds(index * of_block, of_block)], values_ref)
            norms_ref[index : index + 1, :] = l2_norm(values_ref[...], axis=0)[None]

    norms = launch.launch(
        kernel,
        -(-count // of_step),
        [(lines, pl.BlockSpec(block, lambda step: (step, 0)))],
        (
            shape_like((count, LANES), F32, values),
            pl.BlockSpec((of_step, LANES), lambda step: (step, 0)),
        ),
        [pltpu.VMEM((SUPER_GROUP_SIZE, LANES), F32)],
        name="statistics",
    )
    return norms.reshape(-1)[:num_rows]


def energies(payloads: Array, *, layout: Layout) -> Array:
    """Compute logarithms of the energies of the rows of messages."""
    shape, count = Shape(layout), len(payloads)

    def kernel(step, received_ref, energies_ref, message_ref, semaphore):
        index = step // shape.blocks
        block = step - index * shape.blocks

        @pl.when(block == 0)
        def _() -> None:
            transfers.run(words.copy_in(received_ref, index, message_ref, layout, semaphore))

        scales = message.load_scales(layout, block * PLACES, message_ref)
        found = message.row_energies(layout, scales)
        in_order = take_lanes(found, lane_of_places(iota(1)))
        energies_ref[...] = in_order[:1, :][None]

    found = launch.launch(
        kernel,
        count * shape.blocks,
        [(words.as_operand(payloads, layout), launch.IN_MEMORY)],
        (
            shape_like((count * shape.blocks, 1, PLACES), I32, payloads),
            pl.BlockSpec((1, 1, PLACES), lambda step: (step, 0, 0)),
        ),
        [words.memory(layout), pltpu.SemaphoreType.DMA],
        name="energies",
    )
    return found.reshape(count, -1)[:, : shape.rows]
