"""The backend of the Mosaic GPU kernels, and the kernels of all operations."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._jax.compat import has_mosaic_gpu, override, shape_like
from pallas_kernels._mosaic_gpu import launch, message, rows
from pallas_kernels._mosaic_gpu.blocks import for_each_block
from pallas_kernels._mosaic_gpu.launch import ROW
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, Layout, LocalRows, Places
from pallas_kernels.codec.rows import LARGEST_UNIT, inverse_unit
from pallas_kernels.pallas_backend import GpuBackend


class MosaicGpu(GpuBackend):
    """Mosaic GPU kernels for NVIDIA GPUs from Hopper on."""

    name = "mosaic_gpu"
    capability = 9.0  # Hopper

    @override
    def why_not_lowered(self) -> str | None:
        if has_mosaic_gpu():
            return None
        return f"the Mosaic GPU backend of Pallas in JAX {jax.__version__} lacks what it needs"

    @override
    def statistics(self, values: Array, /) -> Array:
        num_rows = values.shape[0]
        if num_rows == 1:  # its result could not be stored: JAX takes it for a scalar
            return self.statistics(jnp.concatenate([values, values]))[:1]
        count = launch.rows_of_block(num_rows)
        shape = launch.piece_shape(count, launch.LANES)

        def kernel(rows_ref, norms_ref):
            first = lax.min(lax.axis_index("block") * count, jnp.int32(num_rows - count))
            pieces = launch.load_rows(shape, rows_ref, first)
            largest = _over_lanes(jnp.max, [jnp.abs(values) for values in pieces], jnp.maximum)
            # As `codec.l2_norm`, of values that several threads hold.
            unit = jnp.minimum(largest, LARGEST_UNIT)
            inverse = launch.spread(inverse_unit(unit), shape, (0,))
            squares = _over_lanes(jnp.sum, [jnp.square(v * inverse) for v in pieces], operator.add)
            norms = norms_ref.at[pl.ds(first, count)]
            launch.store(norms, (count,), unit * jnp.sqrt(squares))

        result = shape_like((num_rows,), jnp.float32, values)
        return launch.launch(kernel, (-(-num_rows // count),), [values.reshape(-1, *ROW)], result)

    @override
    def hop(
        self, payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout
    ) -> Array:
        received = payloads.shape[0]

        def kernel(block, turn_ref, seed_ref, rows_ref, *messages):
            *received_ref, sent_ref = messages
            refs = [received_ref[0].at[index] for index in range(received)]
            pieces = rows.partial_sum(block, rows_ref, refs)
            rows.encode(block, pieces, turn_ref[0], seed_ref, sent_ref)

        messages = [payloads.view(jnp.uint16)] if received else []
        sent = for_each_block(
            kernel,
            layout,
            [chunk, *local.places, turn, local.seed, local.rows.reshape(-1, *ROW), *messages],
            shape_like((layout.payload_bytes // 2,), jnp.uint16, local.rows),
            staged=local.rows.dtype,
        )
        return sent.view(jnp.uint8)

    @override
    def decompress_accumulate(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> Array:
        received = payloads.shape[0]

        def kernel(block, rows_ref, messages_ref, sums_ref):
            refs = [messages_ref.at[index] for index in range(received)]
            pieces = rows.partial_sum(block, rows_ref, refs)
            # Neighbors stay neighbors, so there is nothing to scatter through shared memory.
            launch.store_rows(sums_ref, block.first, pieces)

        sums = for_each_block(
            kernel,
            layout,
            [chunk, *local.places, local.rows.reshape(-1, *ROW), payloads.view(jnp.uint16)],
            shape_like((layout.rows_per_chunk, *ROW), jnp.float32, local.rows),
            staged=local.rows.dtype,
        )
        return sums.reshape(layout.rows_per_chunk, SUPER_GROUP_SIZE)

    @override
    def decompress(self, payloads: Array, places: Places, *, layout: Layout) -> Array:
        def kernel(block, messages_ref, rows_ref):
            pieces = rows.decode(block, message.receive(block, messages_ref.at[block.chunk]))
            rows.scatter(block, pieces, rows_ref)

        decoded = for_each_block(
            kernel,
            layout,
            [0, *places, payloads.view(jnp.uint16)],
            shape_like((layout.num_rows, *ROW), jnp.float32, payloads),
            staged=jnp.float32,
            chunks=layout.num_chunks,
        )
        return decoded.reshape(layout.num_rows, SUPER_GROUP_SIZE)


def _over_lanes(reduction: Callable, pieces: list[Array], pairwise: Callable) -> Array:
    return reduction(reduction(functools.reduce(pairwise, pieces), axis=2), axis=1)
