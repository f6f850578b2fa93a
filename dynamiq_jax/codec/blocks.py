"""Codes of one width, and a few bytes beside each block of them: a message of whole rows of 256.

What a block quantizer adds to this is arithmetic alone. A message has the planes of the codes
first, and then one kind of side bytes after the other, each in the order of the blocks.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec import packing
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE, row_bytes
from dynamiq_jax.codec.scales import bfloat16_value

NAN_BITS = np.uint16(0x7FC0)
_SMALLEST_BITS = np.int32(0x0080)  # 2^-126 as bfloat16: less is subnormal, which backends flush


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Bytes of rows of blocks. A message is contiguous uint8 of any number of rows."""

    bits: int  # of a code, 2 to 16
    block: int  # coordinates of a block; divides 256
    side_bytes: tuple[int, ...]  # 1 or 2 each: what a block has beside its codes

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return SUPER_GROUP_SIZE // self.block

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, everything included."""
        return row_bytes(self.bits) + self.blocks * sum(self.side_bytes)

    def payload_bytes(self, size: int, num_chunks: int) -> int:
        """Bytes of the message of one of `num_chunks` chunks of `size` coordinates."""
        return rows_per_chunk(size, num_chunks) * self.row_bytes

    def pack(self, codes: Array, *sides: Array) -> Array:
        """Joins codes, unsigned integers [rows, 256] below 2**bits, and sides, uint8 or uint16
        [rows, blocks] as `side_bytes` says, into one uint8 message.
        """
        parts = packing.pack(codes.astype(jnp.uint16), self.bits)
        parts += tuple(lax.bitcast_convert_type(side, jnp.uint8) for side in sides)
        return jnp.concatenate([part.reshape(-1) for part in parts])

    def unpack(self, payload: Array) -> tuple[Array, ...]:
        """Inverse of `pack`: codes uint16 [rows, 256] and sides [rows, blocks]."""
        rows, widths = payload.size // self.row_bytes, packing.planes(self.bits)
        sizes = [row_bytes(bits) for bits in widths]
        sizes += [self.blocks * count for count in self.side_bytes]
        parts = jnp.split(payload, rows * np.cumsum(sizes)[:-1])
        planes = tuple(part.reshape(rows, -1) for part in parts[: len(widths)])
        codes = packing.unpack(planes, rows, self.bits).reshape(rows, SUPER_GROUP_SIZE)
        sides = (part.reshape(rows, self.blocks, -1) for part in parts[len(widths) :])
        return codes, *(_join(side) for side in sides)


def rows_per_chunk(size: int, num_chunks: int) -> int:
    """Rows of 256 in each of `num_chunks` equal chunks of `size` coordinates."""
    return -(-size // (num_chunks * SUPER_GROUP_SIZE))


def as_row_chunks(flat: Array, num_chunks: int) -> Array:
    """A bucket [size], padded with zeros, as [num_chunks, coordinates of whole rows]."""
    padded = num_chunks * rows_per_chunk(flat.size, num_chunks) * SUPER_GROUP_SIZE
    return jnp.pad(flat, (0, padded - flat.size)).reshape(num_chunks, -1)


def covering_step(spans: Array, levels: int) -> Array:
    """The smallest normal bfloat16 of which `levels` steps cover a span, and 0 where that is 0.

    So a block of decoded values has the step that it was decoded with, if its largest code is the
    largest that there is.

    Args:
      spans: float32, not negative, up to 2^127; less than 2^-126 counts as 0.
      levels: 1 to 256, so that the product with a bfloat16 is exact in float32.

    Returns:
      bfloat16 bits in uint16.
    """
    quotient = spans * np.float32(1 / levels)
    # Cut off, the quotient is the step or the bfloat16 below it, whatever its roundings: so it is
    # for every significand that a span can have.
    low = lax.bitcast_convert_type(quotient, jnp.int32) >> np.int32(16)
    low = jnp.maximum(low, _SMALLEST_BITS)
    reach = bfloat16_value(lax.bitcast_convert_type(low, jnp.uint32)) * np.float32(levels)
    bits = low + (reach < spans).astype(jnp.int32)
    is_zero = spans < np.finfo(np.float32).tiny
    return jnp.where(is_zero, np.int32(0), bits).astype(jnp.uint16)


def step_value(bits: Array) -> Array:
    """bfloat16 bits, uint16 of any shape, to their float32 value."""
    return bfloat16_value(bits.astype(jnp.uint32))


def in_blocks(rows: Array, block: int) -> Array:
    """Rows [rows, 256] as blocks [rows, 256 / block, block]."""
    return rows.reshape(rows.shape[0], -1, block)


def _join(side: Array) -> Array:
    """uint8 [rows, blocks, 1 or 2] to uint8 or uint16 [rows, blocks]."""
    dtype = jnp.uint16 if side.shape[-1] == 2 else jnp.uint8
    return lax.bitcast_convert_type(side, dtype).reshape(side.shape[:2])
