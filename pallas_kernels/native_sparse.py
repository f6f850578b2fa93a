"""Sparse messages in the native codec for CPUs.

The bytes and the decoded bits are those of `dynamiq_jax.islands.messages.sparse`, which is their
specification. A block has a power of two coordinates, 256 to 65,536.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import _native
from pallas_kernels._native.backend import call, message_of


def is_here() -> bool:
    """Return whether programs use the native library now: none of these sums is a fused one."""
    return _native.why_not_here() is None


def encode(rows: Array, size: int, *, keep: int, bits: int, factor: np.float32) -> Array:
    """Encode float32 [blocks, coordinates] to uint8 [size].

    Args:
      rows: values.
      size: bytes of the message.
      keep: number of coordinates of a block that are kept.
      bits: of a value, 1 to 4.
      factor: of the scale of a block.
    """
    return call("sparse_encode", message_of(size), [rows], keep=keep, bits=bits, factor=factor)


def decode(message: Array, shape: tuple[int, int], *, keep: int, bits: int) -> Array:
    """Decode a message, uint8, to float32 of a shape [blocks, coordinates]; see `encode`."""
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    return call("sparse_decode", rows, [message], keep=keep, bits=bits)
