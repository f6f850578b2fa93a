"""The baselines that a compressed all-reduce has to beat: float32 and bfloat16 on the wire."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import RecodedChunks, SummedChunks, WireCost
from dynamiq_jax.methods._base import Call, ChunkedMethod
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(ChunkedMethod):
    """Lossless float32 sums: a baseline that takes every step of a compressed method."""

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return WireCost(payload_bytes=4 * -(-call.size // call.num_chunks))

    @override
    def bind(self, values: Array, call: Call, key: Array) -> SummedChunks:
        local = call.local_chunks(values.astype(jnp.float32))
        return SummedChunks(
            encoded=local.values,
            decode=lambda sums, chunk: sums.reshape(-1),
            size=local.size,
            first=local.first,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BF16(ChunkedMethod):
    """Partial sums in float32, rounded to the nearest bfloat16 at every hop.

    Bits are sent as uint16: XLA:CPU widens bfloat16 to float32 in its collectives, which would
    double the bytes.
    """

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return WireCost(payload_bytes=2 * -(-call.size // call.num_chunks))

    @override
    def bind(self, values: Array, call: Call, key: Array) -> RecodedChunks:
        local = call.local_chunks(values)
        return RecodedChunks(
            local=local,
            encode=lambda values, chunk, turn: lax.bitcast_convert_type(
                values.astype(jnp.bfloat16), jnp.uint16
            ),
            decode=lambda bits, _: lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32),
        )
