"""The backend of the Triton kernels, and the kernels of all operations."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._jax.compat import has_triton, override, shape_like
from pallas_kernels._triton import message, rows
from pallas_kernels._triton.blocks import LaunchConfig, for_each_block, launch
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, Layout, LocalRows, Places
from pallas_kernels.codec.rows import LARGEST_UNIT, inverse_unit
from pallas_kernels.pallas_backend import GpuBackend


class Triton(GpuBackend):
    """Triton kernels for NVIDIA GPUs from Ampere on."""

    name = "triton"
    capability = 8.0  # Ampere

    def __init__(self, config: LaunchConfig = LaunchConfig()):
        self._config = config

    @override
    def why_not_lowered(self) -> str | None:
        return None if has_triton() else f"JAX {jax.__version__} has no Triton backend of Pallas"

    @override
    def statistics(self, rows_of_bucket: Array, /) -> Array:
        num_rows, config = rows_of_bucket.shape[0], self._config

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

        shape = shape_like((num_rows,), jnp.float32, rows_of_bucket)
        grid = (pl.cdiv(num_rows, config.rows),)
        return launch(kernel, grid, config, [rows_of_bucket], shape)

    @override
    def hop(
        self, payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout
    ) -> Array:
        received = payloads.shape[0]

        def kernel(block, row, turn_ref, seed_ref, rows_ref, *messages):
            received_ref, sent_ref = messages[0], messages[-1]
            pieces = rows.gather(rows_ref, row)
            if received:
                pieces = rows.add_messages(block, pieces, received_ref, received)
            rows.encode(block, pieces, turn_ref[0], seed_ref, sent_ref)

        messages = [payloads.reshape(-1).view(jnp.uint16)] if received else []
        sent = for_each_block(
            kernel,
            layout,
            self._config,
            [chunk, *local.places, turn, local.seed, local.rows, *messages],
            shape_like((layout.payload_bytes // 2,), jnp.uint16, local.rows),
            first=lambda used, *refs: message.pad(layout, used, refs[-1]),
        )
        return sent.view(jnp.uint8)

    @override
    def decompress_accumulate(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> Array:
        received = payloads.shape[0]

        def kernel(block, row, rows_ref, messages_ref, sums_ref):
            pieces = rows.gather(rows_ref, row)
            pieces = rows.add_messages(block, pieces, messages_ref, received)
            rows.scatter(pieces, sums_ref, block.place)

        return for_each_block(
            kernel,
            layout,
            self._config,
            [chunk, *local.places, local.rows, payloads.reshape(-1).view(jnp.uint16)],
            shape_like((layout.rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32, local.rows),
        )

    @override
    def decompress(self, payloads: Array, places: Places, *, layout: Layout) -> Array:
        def kernel(block, row, messages_ref, rows_ref):
            start = block.chunk * (layout.payload_bytes // 2)
            rows.scatter(rows.decode(block, messages_ref, start), rows_ref, row)

        return for_each_block(
            kernel,
            layout,
            self._config,
            [None, *places, payloads.reshape(-1).view(jnp.uint16)],
            shape_like((layout.num_rows, SUPER_GROUP_SIZE), jnp.float32, payloads),
        )
