"""No compression: float32 on the wire, on the same path as every other method."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dynamiq_jax._core import SummedChunks, WireCost
from dynamiq_jax.methods._base import Call, ChunkedMethod
from pallas_kernels.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(ChunkedMethod):
    """Sums in float32 without loss: a baseline that takes every step of a compressed method."""

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
