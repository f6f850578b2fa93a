"""Codecs in plain jnp that a user would compare with: XLA fuses them, and nothing is sorted."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@dataclasses.dataclass(frozen=True)
class PlainCodec:
    """Blocks of one-byte codes under a scale."""

    block: int  # coordinates that share a scale
    scale_bytes: int
    encode: Callable[[Array], tuple[Array, Array]]  # float32 [blocks, block] to codes and scales
    decode: Callable[[Array, Array], Array]

    @property
    def wire_bytes(self) -> float:
        """Bytes of a coordinate on the wire."""
        return 1 + self.scale_bytes / self.block

    def blocks(self, values: Array) -> Array:
        """Cut values of any shape into blocks, float32 [blocks, block]."""
        return values.reshape(-1, self.block).astype(jnp.float32)

    def hop(self, codes: Array, scale: Array, blocks: Array) -> tuple[Array, Array]:
        """Decode a message, add local blocks, and encode the sum."""
        return self.encode(self.decode(codes, scale) + blocks)


def _int8_encode(blocks: Array) -> tuple[Array, Array]:
    scale = jnp.max(jnp.abs(blocks), axis=1, keepdims=True) * np.float32(1 / 127)
    inverse = jnp.where(scale > 0, 1 / scale, np.float32(0))
    return jnp.round(blocks * inverse).astype(jnp.int8), scale


def _int8_decode(codes: Array, scale: Array) -> Array:
    return codes.astype(jnp.float32) * scale


def _mxfp8_encode(blocks: Array) -> tuple[Array, Array]:
    largest = np.float32(448)  # of E4M3
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis=1, keepdims=True), jnp.uint32)
    # floor(log2 amax) - 8, biased by 127, is the scale's byte.
    exponent = jnp.maximum(bits >> np.uint32(23), np.uint32(9)) - np.uint32(8)
    scaled = blocks * _power_of_two(np.uint32(254) - exponent)
    codes = jnp.clip(scaled, -largest, largest).astype(jnp.float8_e4m3fn)
    return codes, exponent.astype(jnp.uint8)


def _mxfp8_decode(codes: Array, exponent: Array) -> Array:
    return codes.astype(jnp.float32) * _power_of_two(exponent.astype(jnp.uint32))


def _power_of_two(exponent: Array) -> Array:
    """Return 2 ^ (exponent - 127)."""
    return lax.bitcast_convert_type(exponent << np.uint32(23), jnp.float32)


PLAIN_CODECS = {
    # Under a float32 scale, to nearest: what one would write in ten lines.
    "int8": PlainCodec(128, 4, _int8_encode, _int8_decode),
    # Elements of E4M3 under a power of two: the casts of OCP microscaling.
    "mxfp8": PlainCodec(32, 1, _mxfp8_encode, _mxfp8_decode),
}
