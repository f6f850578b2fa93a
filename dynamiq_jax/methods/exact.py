"""No compression: float32 on the wire, on the same path as every other method."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.chunks import SummedChunks
from dynamiq_jax.methods.base import ChunkedMethod, WireCost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(ChunkedMethod):
    """Sums in float32 without loss. The baseline that takes every step that a compressed method
    takes.
    """

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`."""
        return WireCost(payload_bytes=4 * -(-size // num_chunks), statistics_bytes=0)

    def bind(
        self, flat: Array, axis_name: str, num_workers: int, num_chunks: int, key: Array
    ) -> SummedChunks:
        """See `Method`."""
        size = flat.size
        padded = jnp.pad(flat.astype(jnp.float32), (0, -size % num_chunks))
        return SummedChunks(
            padded.reshape(num_chunks, -1), lambda chunks: chunks.reshape(-1)[:size]
        )
