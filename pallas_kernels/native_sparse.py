"""Sparse messages in the native codec for CPUs.

The bytes and the decoded bits are those of `dynamiq_jax.islands.messages.sparse`, which is their
specification.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import _native
from pallas_kernels._native.backend import call


def is_here() -> bool:
    """Return whether programs use the native library now: none of these sums is a fused one."""
    return _native.why_not_here() is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeSparse:
    """Blocks of which some coordinates are kept."""

    keep: int  # of a block
    bits: int  # of a value, 1 to 4

    def encode(self, rows: Array, factor: np.float32, size: int) -> Array:
        """Encode float32 [blocks, coordinates] to uint8 [size].

        Args:
          rows: values. A block has a power of two coordinates, 256 to 65,536.
          factor: of the scale of a block.
          size: bytes of the message.
        """
        shape = ((size,), jnp.uint8)
        [message] = call("sparse_encode", [shape], [rows], **self._attributes, factor=factor)
        return message

    def decode(self, message: Array, shape: tuple[int, int]) -> Array:
        """Decode a message, uint8, to float32 of a shape [blocks, coordinates]."""
        [rows] = call("sparse_decode", [(shape, jnp.float32)], [message], **self._attributes)
        return rows

    @property
    def _attributes(self) -> dict[str, np.int64]:
        return {"keep": np.int64(self.keep), "bits": np.int64(self.bits)}
