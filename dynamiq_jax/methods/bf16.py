"""bfloat16 on the wire: the baseline of 16 bits that a compressed all-reduce has to beat."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.chunks import RecodedChunks, WireCost, as_chunks
from dynamiq_jax.methods.base import ChunkedMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class BF16(ChunkedMethod):
    """Partial sums are added in float32 and rounded to the nearest bfloat16 at every hop.

    Bits travel as uint16: XLA:CPU widens bfloat16 to float32 in its collectives, which would double
    the bytes.
    """

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`."""
        return WireCost(payload_bytes=2 * -(-size // num_chunks), statistics_bytes=0)

    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> RecodedChunks:
        """See `ChunkedMethod`."""
        return _chunks(values=as_chunks(flat, num_chunks), size=flat.size)

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> RecodedChunks:
        """See `ChunkedMethod`."""
        return _chunks(
            values=part[None], size=num_workers * part.size, first=lax.axis_index(axis_name)
        )


def _chunks(**held: Any) -> RecodedChunks:
    return RecodedChunks(
        encode=lambda values, chunk, turn: lax.bitcast_convert_type(
            values.astype(jnp.bfloat16), jnp.uint16
        ),
        decode=lambda bits, chunk: lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32),
        **held,
    )
