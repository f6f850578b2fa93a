"""Messages of block quantizers: codes of one width, and a few bytes beside each block of them.

A message holds whole rows of 256: first the planes of the codes, then one kind of side bytes after
the other, each in the order of the blocks.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.codec import SUPER_GROUP_SIZE, packing, row_bytes
from pallas_kernels.codec.scales import bfloat16_value

BLOCKS = (32, 64, 128, 256)  # coordinates of a block: rows are whole, and an index fits a byte

_SMALLEST_BITS = np.int32(0x0080)  # 2^-126 as bfloat16: less is subnormal, which backends flush
_SIDE_DTYPES = {1: jnp.uint8, 2: jnp.uint16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Bytes of rows of blocks. A message is contiguous uint8 of any number of rows."""

    bits: int  # of a code, 2 to 16
    block: int  # coordinates of a block; divides 256
    side_bytes: tuple[int, ...]  # 1 or 2 each: numbers that a block has beside its codes

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return SUPER_GROUP_SIZE // self.block

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, everything included."""
        return row_bytes(self.bits) + self.blocks * sum(self.side_bytes)

    def zeros(self, rows: int) -> tuple[Array, ...]:
        """Return codes and sides of zero, of the shapes and dtypes that `pack` takes."""
        sides = [jnp.zeros((rows, self.blocks), _SIDE_DTYPES[count]) for count in self.side_bytes]
        return jnp.zeros((rows, SUPER_GROUP_SIZE), jnp.uint16), *sides

    def pack(self, codes: Array, *sides: Array) -> Array:
        """Join codes, uint16 [rows, 256] below 2**bits, and sides, uint8 or uint16 [rows, blocks]
        as `side_bytes` says, into one uint8 message.
        """
        parts = packing.pack(codes, self.bits)
        parts += [lax.bitcast_convert_type(side, jnp.uint8).reshape(-1) for side in sides]
        return jnp.concatenate(parts)

    def unpack(self, payload: Array) -> tuple[Array, ...]:
        """Invert `pack`."""
        rows = payload.size // self.row_bytes
        start = rows * row_bytes(self.bits)
        codes = packing.unpack(payload[:start], rows, self.bits).reshape(rows, SUPER_GROUP_SIZE)
        sides = []
        for count in self.side_bytes:
            stop = start + rows * self.blocks * count
            side = payload[start:stop].reshape(rows, self.blocks, count)
            # One byte has no axis of bytes to join.
            side = side if count > 1 else side[..., 0]
            sides.append(lax.bitcast_convert_type(side, _SIDE_DTYPES[count]))
            start = stop
        return codes, *sides


def rows_per_chunk(size: int, num_chunks: int) -> int:
    """Return the rows of 256 in each of `num_chunks` equal chunks of `size` coordinates."""
    return -(-size // (num_chunks * SUPER_GROUP_SIZE))


def covering_step(spans: Array, levels: int) -> Array:
    """Return the smallest normal bfloat16 of which `levels` steps cover a span, and 0 for a span
    of 0.

    If the largest code of a block is the largest possible one, its decoded values have the same
    step again.

    Args:
      spans: float32, not negative, up to 2^127; less than 2^-126 counts as 0.
      levels: 1 to 256, so that the product with a bfloat16 is exact in float32.

    Returns:
      Bits of bfloat16 in uint16.
    """
    quotient = spans * np.float32(1 / levels)
    # Cut off, the quotient is the step or the bfloat16 below it, despite its roundings. This was
    # checked for every significand of a span.
    low = lax.bitcast_convert_type(quotient, jnp.int32) >> np.int32(16)
    low = jnp.maximum(low, _SMALLEST_BITS)
    reach = bfloat16_value(low) * np.float32(levels)
    bits = low + (reach < spans).astype(jnp.int32)
    is_zero = spans < np.finfo(np.float32).tiny
    return jnp.where(is_zero, np.int32(0), bits).astype(jnp.uint16)


def in_blocks(rows: Array, block: int) -> Array:
    """Reshape rows [rows, 256] to blocks [rows, 256 / block, block]."""
    return rows.reshape(rows.shape[0], -1, block)
