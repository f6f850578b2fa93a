"""Codec of a format with one width that runs in the native codec on CPUs, with the same bytes."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._core import Payload, RecodedChunks
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index
from pallas_kernels.native_blocks import NativeBlocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeChunks(RecodedChunks):
    """`RecodedChunks` whose operations are single calls on CPUs, on all threads of XLA.

    On other platforms, its functions `encode` and `decode` run. They specify the bytes.
    """

    blocks: NativeBlocks
    seed: Array  # of the noise, uint32 [2]; not read without noise

    @override
    def compress(self, chunk: Array, turn: Index) -> Array:
        otherwise = super().compress
        nothing = jnp.zeros((0, self.blocks.payload_bytes), jnp.uint8)
        return lax.platform_dependent(
            cpu=lambda: self._hop(nothing, chunk, turn), default=lambda: otherwise(chunk, turn)
        )

    @override
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Array:
        otherwise = super().hop
        return lax.platform_dependent(
            payloads,
            cpu=lambda payloads: self._hop(payloads, chunk, turn),
            default=lambda payloads: otherwise(payloads, chunk, turn),
        )

    @override
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        otherwise = super().accumulate
        return lax.platform_dependent(
            payloads,
            cpu=lambda payloads: self.blocks.accumulate(
                payloads, self._rows, chunk - self.local.first
            ).reshape(-1),
            default=lambda payloads: otherwise(payloads, chunk),
        )

    @override
    def decompress(self, payloads: Payload) -> Array:
        return lax.platform_dependent(
            payloads,
            cpu=lambda payloads: self.blocks.decompress(payloads).reshape(-1)[: self.local.size],
            default=super().decompress,
        )

    def _hop(self, payloads: Array, chunk: Array, turn: Index) -> Array:
        place = chunk - self.local.first
        return self.blocks.hop(payloads, self._rows, place, chunk, turn, self.seed)

    @property
    def _rows(self) -> Array:
        return self.local.values.reshape(-1, SUPER_GROUP_SIZE)
