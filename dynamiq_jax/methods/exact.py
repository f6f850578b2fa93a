"""No compression: float32 on the wire, on the same path as every other method."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.chunks import SummedChunks, WireCost, as_chunks
from dynamiq_jax.methods.base import ChunkedMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(ChunkedMethod):
    """Sums in float32 without loss. The baseline that takes every step that a compressed method
    takes.
    """

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`."""
        return WireCost(payload_bytes=4 * -(-size // num_chunks), statistics_bytes=0)

    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> SummedChunks:
        """See `ChunkedMethod`."""
        chunks = as_chunks(flat.astype(jnp.float32), num_chunks)
        return SummedChunks(encoded=chunks, decode=lambda sums: sums, size=flat.size)

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> SummedChunks:
        """See `ChunkedMethod`."""
        return SummedChunks(
            encoded=part.astype(jnp.float32)[None],
            decode=lambda parts: parts,
            size=num_workers * part.size,
            first=lax.axis_index(axis_name),
        )
