"""Codec of one bucket of DynamiQ: rows in the order of a table, and messages of the kernels."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import ChunkCodec, SumCodec
from pallas_kernels import operations
from pallas_kernels._jax.compat import override
from pallas_kernels.backend import Backend
from pallas_kernels.codec import Index, Layout, LocalRows, Places, make_places, rank, restore_rows

# Fewest workers for which ordering the rows of sums again lowers the error. With fewer workers, and
# rows in their places, the rounding of the sum still cancels part of the earlier roundings.
_MIN_WORKERS_TO_REORDER = 8


def reorders_sums(num_workers: int) -> bool:
    """Return whether an all-to-all orders the rows of each sum by the sum itself."""
    return num_workers >= _MIN_WORKERS_TO_REORDER


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamiQChunks(ChunkCodec):
    """Codec of one bucket."""

    local: LocalRows
    layout: Layout
    implementation: str | None
    first: Index = 0  # row of the bucket that the local rows start with
    row_norms: Array | None = None  # of all rows, uint16 bits of bfloat16: they gave the places

    METRICS: ClassVar[tuple[str, ...]] = ("width_min", "width_max", "width_std")

    @override
    def compress(self, chunk: Array, turn: Index) -> Array:
        places = self.local.places
        places = places._replace(order=places.order - self.first)
        local = self.local._replace(places=places)
        return operations.compress(
            local, chunk, turn, layout=self.layout, implementation=self.implementation
        )

    @override
    def hop(self, payloads: Array, chunk: Array, turn: Index) -> Array:
        return self._run.hop(payloads, self.local, chunk, turn, layout=self.layout)

    @override
    def accumulate(self, payloads: Array, chunk: Array) -> Array:
        order = self.local.places.order[chunk] - chunk * self.layout.rows_per_chunk
        sums = self._run.decompress_accumulate(payloads, self.local, chunk, layout=self.layout)
        return restore_rows(sums, order).reshape(-1)

    @override
    def decompress(self, payloads: Array) -> Array:
        return self.layout.as_flat(self._decoded(payloads))

    @override
    def rounded(self, turn: Index) -> "tuple[Array, DynamiQChunks]":
        chunks = jnp.arange(self.layout.num_chunks, dtype=jnp.int32)
        rows = self._decoded(lax.map(lambda chunk: self.compress(chunk, turn), chunks))
        local = self.local._replace(rows=rows)
        return self.layout.as_flat(rows), dataclasses.replace(self, local=local)

    @override
    def of_sums(self, num_workers: int) -> SumCodec:
        return ReorderedSums(self) if reorders_sums(num_workers) else self

    def _decoded(self, payloads: Array) -> Array:
        return self._run.decompress(payloads, self.local.places, layout=self.layout)

    @override
    def metrics(self) -> dict[str, Array]:
        widths = self.local.places.widths.astype(jnp.float32)
        statistics = jnp.min(widths), jnp.max(widths), jnp.std(widths)
        return dict(zip(self.METRICS, statistics, strict=True))

    @property
    def _run(self) -> Backend:
        return operations.by(self.implementation)


@dataclasses.dataclass(frozen=True)
class ReorderedSums(SumCodec):
    """Codec that orders the rows of each chunk again, by the scales of its sum.

    The table follows the norms of the workers' values. Where much cancels in the sum, they are a
    poor estimate of the norms of its rows. The message has its scales in the order of the table,
    and its codes in the new order, which a receiver computes from the scales. (Section 7 of
    docs/wire_format.md.)
    """

    chunks: DynamiQChunks

    @override
    def hop(self, payloads: Array, chunk: Array, turn: Index) -> Array:
        codec, layout = self.chunks, self.chunks.layout
        sums, of_sums = codec._run.scaled_sums(payloads, codec.local, chunk, layout=layout)
        # The operations look up the places of a chunk by its index.
        every_chunk = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (layout.num_chunks, leaf.size)),
            self._places(of_sums[None]),
        )
        local = codec.local._replace(rows=sums, places=every_chunk)
        message = dataclasses.replace(codec, local=local).compress(chunk, turn)
        # The scales that the places are made from, even if a GPU's reciprocal rounds differently.
        return layout.with_scales_of(message, of_sums)

    @override
    def decompress(self, payloads: Array) -> Array:
        codec, of_sums = self.chunks, self._places(payloads)
        order = jnp.take_along_axis(codec.local.places.order, of_sums.order, axis=1)
        places = of_sums._replace(order=order)
        rows = codec._run.decompress_sums(payloads, places, of_sums.order, layout=codec.layout)
        return codec.layout.as_flat(rows)

    def _places(self, payloads: Array) -> Places:
        """Return the places of the rows of sums in messages, by the scales in the messages."""
        run, layout = self.chunks._run, self.chunks.layout
        energies = run.energies(payloads, layout=layout)
        order, ranked = rank(energies.astype(jnp.uint16), sort=run.sort)
        plane_rows = run.solve(ranked.astype(jnp.int32), layout=layout)
        return make_places(order, plane_rows)
