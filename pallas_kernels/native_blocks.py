"""Formats with one width in the native codec for CPUs: the MX formats and block integers.

Their blocks have bytes beside their codes. The bytes and the decoded bits are those of
`dynamiq_jax.methods`, which is their specification.
"""

import dataclasses

from jax import Array

from pallas_kernels._native.backend import call, loaded, message_of, one, rows_of
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
        operands = [payloads, loaded(rows), one(place), one(chunk), seed, one(turn)]
        message, is_noisy = message_of(self.payload_bytes), int(self.is_noisy)
        return call("block_hop", message, operands, **self._attributes, is_noisy=is_noisy)

    def accumulate(self, payloads: Array, rows: Array, place: Index) -> Array:
        """Return the sum that `hop` encodes, float32 [rows, 256]."""
        operands = [payloads, loaded(rows), one(place)]
        return call("block_accumulate", rows_of(self.rows), operands, **self._attributes)

    def decompress(self, payloads: Array) -> Array:
        """Decode messages, uint8 [chunks, payload_bytes]: float32 [chunks * rows, 256]."""
        values = rows_of(len(payloads) * self.rows)
        return call("block_decompress", values, [payloads], **self._attributes)

    @property
    def _attributes(self) -> dict[str, int]:
        return {
            "format": list(FORMATS).index(self.name),
            "width": self.width,
            "rows_of_chunk": self.rows,
        }
