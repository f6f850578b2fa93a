"""Formats with one width in the native codec for CPUs: the MX formats and block integers.

Their blocks have bytes beside their codes. The bytes and the decoded bits are those of
`dynamiq_jax.methods`, which is their specification.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels._native.backend import call, loaded, one
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, row_bytes

# In the order of `Kernels::blocks`, with the bytes that a row has beside its codes.
FORMATS = {
    **dict.fromkeys(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8"), 8),
    **{f"integer{block}": 2 * SUPER_GROUP_SIZE // block for block in (32, 64, 128, 256)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeBlocks:
    """Messages of one format, of chunks of as many rows of 256 each."""

    name: str  # of `FORMATS`
    width: int  # bits of a code
    rows: int  # of a chunk
    is_noisy: bool = False  # independent noise, in place of rounding to nearest

    @property
    def payload_bytes(self) -> int:
        """Bytes of a message."""
        return self.rows * (row_bytes(self.width) + FORMATS[self.name])

    def hop(
        self, payloads: Array, rows: Array, place: Index, chunk: Index, turn: Index, seed: Array
    ) -> Array:
        """Add received messages and a chunk of the local rows in float32, and encode the sum.

        Args:
          payloads: received messages, uint8 [received, payload_bytes]; may be none.
          rows: [local chunks * rows, 256], of a floating dtype.
          place: index of the chunk among the local ones.
          chunk: index of the chunk in the bucket.
          seed: uint32 [2].
        """
        shape = ((self.payload_bytes,), jnp.uint8)
        operands = [payloads, loaded(rows), one(place), one(chunk), seed, one(turn)]
        noisy = np.int64(self.is_noisy)
        [message] = call("block_hop", [shape], operands, **self._attributes, is_noisy=noisy)
        return message

    def accumulate(self, payloads: Array, rows: Array, place: Index) -> Array:
        """Return the sum that `hop` encodes, float32 [rows, 256]."""
        shape = ((self.rows, SUPER_GROUP_SIZE), jnp.float32)
        operands = [payloads, loaded(rows), one(place)]
        [sums] = call("block_accumulate", [shape], operands, **self._attributes)
        return sums

    def decompress(self, payloads: Array) -> Array:
        """Decode messages, uint8 [chunks, payload_bytes]: float32 [chunks * rows, 256]."""
        shape = ((len(payloads) * self.rows, SUPER_GROUP_SIZE), jnp.float32)
        [values] = call("block_decompress", [shape], [payloads], **self._attributes)
        return values

    @property
    def _attributes(self) -> dict[str, np.int64]:
        return {
            "format": np.int64(list(FORMATS).index(self.name)),
            "width": np.int64(self.width),
            "rows_of_chunk": np.int64(self.rows),
        }
