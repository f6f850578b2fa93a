"""One bucket of DynamiQ: rows in the order of a table, and messages of the kernels."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.chunks import ChunkCodec, SumCodec
from dynamiq_jax.codec import scales
from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.ordering import rank, restore_rows
from pallas_kernels.compress.api import compress
from pallas_kernels.decompress.api import decompress
from pallas_kernels.decompress_accumulate.api import decompress_accumulate
from pallas_kernels.hop.api import hop

# Workers from which on it pays to order the rows of sums again. Of fewer, the rounding of the sum
# still cancels those before it, as long as rows stay where they are.
_MANY = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamiQChunks(ChunkCodec):
    """`ChunkCodec` of one bucket."""

    rows: Array  # local values, float [num_rows, 256], or [rows_per_chunk, 256] of a part
    order: Array  # int32 [num_chunks, rows_per_chunk]
    seed: Array  # uint32 [2]
    shift: Array | None  # what the subtracted means add up to, float32 [num_rows]
    layout: Layout
    implementation: str | None
    first: Array | int = 0  # row of the bucket that `rows` starts with

    def compress(self, chunk: Array, turn: Array | int) -> Array:
        """See `ChunkCodec`: uint8 [payload_bytes]."""
        return compress(
            self.rows,
            self.order - self.first,
            chunk,
            turn,
            self.seed,
            layout=self.layout,
            implementation=self.implementation,
        )

    def hop(self, payloads: Array, chunk: Array, turn: Array | int) -> Array:
        """See `ChunkCodec`."""
        return hop(
            payloads,
            self.rows,
            self.order,
            chunk,
            turn,
            self.seed,
            layout=self.layout,
            implementation=self.implementation,
        )

    def accumulate(self, payloads: Array, chunk: Array) -> Array:
        """See `ChunkCodec`."""
        first = chunk * self.layout.rows_per_chunk
        rows = restore_rows(self.sums(payloads, chunk), self.order[chunk] - first)
        if self.shift is not None:
            mine = lax.dynamic_slice_in_dim(self.shift, first, self.layout.rows_per_chunk)
            rows = rows + mine[:, None]
        return rows.reshape(-1)

    def decompress(self, payloads: Array) -> Array:
        """See `ChunkCodec`."""
        rows = self._decoded(payloads)
        return self.layout.as_flat(rows if self.shift is None else rows + self.shift[:, None])

    def once(self, turn: Array | int, num_workers: int) -> "tuple[Array, DynamiQChunks]":
        """See `ChunkCodec`."""
        payloads = lax.map(lambda chunk: self.compress(chunk, turn), jnp.arange(len(self.order)))
        rows = self._decoded(payloads)
        mean = (
            np.float32(0) if self.shift is None else self.shift[:, None] / np.float32(num_workers)
        )
        return self.layout.as_flat(rows + mean), dataclasses.replace(self, rows=rows)

    def for_sums(self, num_workers: int) -> SumCodec:
        """See `ChunkCodec`."""
        return ReorderedSums(self) if num_workers >= _MANY else self

    def sums(self, payloads: Array, chunk: Array) -> Array:
        """Received partial sums of a chunk plus the local rows, without what `shift` adds: float32
        [rows_per_chunk, 256], in the order of the table.
        """
        return decompress_accumulate(
            payloads,
            self.rows,
            self.order,
            chunk,
            layout=self.layout,
            implementation=self.implementation,
        )

    def _decoded(self, payloads: Array) -> Array:
        """Rows of the bucket without what `shift` adds: float32 [num_rows, 256]."""
        return decompress(
            payloads, self.order, layout=self.layout, implementation=self.implementation
        )


@dataclasses.dataclass(frozen=True)
class ReorderedSums:
    """`SumCodec` that orders the rows of each chunk again, by the scales of its sum.

    The table follows the norms of what the workers hold, and these say little of a sum in which
    much cancels. The message carries all that is needed to follow: its scales stay in the order of
    the table, its codes are in the new one. (docs/wire_format.md, section 7)
    """

    chunks: DynamiQChunks

    def hop(self, payloads: Array, chunk: Array, turn: Array | int) -> Array:
        """See `SumCodec`."""
        codec, layout = self.chunks, self.chunks.layout
        sums = codec.sums(payloads, chunk)
        of_sums = scales.quantize_scales(scales.group_maxima(sums, layout.group_size))
        order = rank(scales.row_energies(*of_sums))
        table = jnp.broadcast_to(order, codec.order.shape)
        message = dataclasses.replace(codec, rows=sums, order=table).compress(chunk, turn)
        # Those that the order is made from, also where a GPU's reciprocal rounds another way.
        return layout.with_scales(message, *of_sums)

    def decompress(self, payloads: Array) -> Array:
        """See `SumCodec`."""
        layout = self.chunks.layout
        group_bytes, super_bits = layout.scales(payloads)
        order = rank(scales.row_energies(group_bytes, super_bits))
        ordered = (
            jnp.take_along_axis(self.chunks.order, order, axis=1),
            jnp.take_along_axis(group_bytes, order[..., None], axis=1),
            jnp.take_along_axis(super_bits, order, axis=1),
        )
        # Fused into the decoding of every block, the gathers take twice its time on XLA:CPU.
        table, *of_rows = lax.optimization_barrier(ordered)
        codec = dataclasses.replace(self.chunks, order=table)
        return codec.decompress(layout.with_scales(payloads, *of_rows))
