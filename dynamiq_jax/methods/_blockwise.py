"""Base of block quantizers: every block by itself, decoded and encoded again at every hop.

A message holds whole rows of 256: first the planes of the codes, then one kind of side bytes after
the other, each in the order of the blocks.
"""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._core import Payload, RecodedChunks, WireCost
from dynamiq_jax.methods._base import Call, ChunkedMethod
from pallas_kernels import choice
from pallas_kernels._jax.compat import match_varying, override
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, offsets, packing, row_bytes
from pallas_kernels.codec.scales import bfloat16_value
from pallas_kernels.native_blocks import NativeBlocks
from pallas_kernels.row_blocks import for_each_block

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
        """Join codes and sides into one message, uint8.

        Codes are uint16 [rows, 256] below 2**bits. Sides are uint8 or uint16 [rows, blocks], by
        `side_bytes`.
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
            side = payload[start:stop].view(_SIDE_DTYPES[count])
            sides.append(side.reshape(rows, self.blocks))
            start = stop
        return codes, *sides


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseMethod(ChunkedMethod):
    """A method that codes each block on its own, perhaps with noise, without statistics."""

    @property
    @abc.abstractmethod
    def format(self) -> BlockFormat:
        """Bytes of a row."""

    @property
    def is_stochastic(self) -> bool:
        """True if `encode_rows` takes noise."""
        return False

    @property
    def native_format(self) -> str | None:
        """Name of the format in the native codec for CPUs; None if it has none."""
        return None

    @abc.abstractmethod
    def encode_rows(self, rows: Array, noise: Array | None) -> tuple[Array, ...]:
        """Encode float32 [rows, 256] to the arrays that `BlockFormat.pack` takes.

        Noise is float32 [rows, 256] in (0, 1), or None.
        """

    @abc.abstractmethod
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        """Decode the arrays that `BlockFormat.unpack` returns to float32 [rows, 256]."""

    @override
    def wire_cost(self, call: Call) -> WireCost:
        rows = rows_per_chunk(call.size, call.num_chunks)
        return WireCost(payload_bytes=rows * self.format.row_bytes)

    @override
    def bind(self, values: Array, call: Call, key: Array) -> RecodedChunks:
        seed = jax.random.bits(key, (2,), jnp.uint32) if self.is_stochastic else None
        local = call.local_chunks(values, SUPER_GROUP_SIZE)
        codec = RecodedChunks(
            local=local,
            encode=functools.partial(self._encode, seed),
            decode=lambda payload, _: self.decode_rows(*self.format.unpack(payload)).reshape(-1),
        )
        if self.native_format is None or not choice.is_native():
            return codec
        blocks = NativeBlocks(
            name=self.native_format,
            width=self.format.bits,
            rows=local.values.shape[1] // SUPER_GROUP_SIZE,
            is_noisy=self.is_stochastic,
        )
        seed = jnp.zeros(2, jnp.uint32) if seed is None else seed
        return NativeChunks(**vars(codec), blocks=blocks, seed=seed)

    def _encode(self, seed: Array | None, values: Array, chunk: Array, turn: Index) -> Array:
        """Encode values to a message, some rows after the other.

        Codes wait in memory before they are packed. If fused with the packing, XLA:CPU rounds again
        for every plane, which takes MXFP6 six times as long.
        """
        rows = values.reshape(-1, SUPER_GROUP_SIZE)
        rows_before = jnp.asarray(chunk).astype(jnp.uint32) * np.uint32(len(rows))

        def step(first: Index, count: int, parts: tuple[Array, ...]) -> tuple[Array, ...]:
            some, noise = lax.dynamic_slice_in_dim(rows, first, count), None
            if seed is not None:
                ids = rows_before + jnp.asarray(first).astype(jnp.uint32)
                ids = ids + jnp.arange(count, dtype=jnp.uint32)
                noise = jnp.asarray(offsets(ids, turn, seed, "independent"))
            return tuple(
                lax.dynamic_update_slice_in_dim(part, block, first, axis=0)
                for part, block in zip(parts, self.encode_rows(some, noise), strict=True)
            )

        empty = match_varying(self.format.zeros(len(rows)), values)
        return self.format.pack(*for_each_block(len(rows), step, empty))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeChunks(RecodedChunks):
    """`RecodedChunks` whose operations are single calls on CPUs, on all threads of XLA.

    On other platforms, its functions `encode` and `decode` run. They specify the bytes.
    """

    blocks: NativeBlocks
    seed: Array  # of the noise, uint32 [2]; not read without noise

    @override
    def compress(self, chunk: Array, turn: Index) -> Array:
        nothing = jnp.zeros((0, self.blocks.payload_bytes), jnp.uint8)
        on_cpu = functools.partial(self._hop, nothing)
        return lax.platform_dependent(chunk, turn, cpu=on_cpu, default=super().compress)

    @override
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Array:
        return lax.platform_dependent(payloads, chunk, turn, cpu=self._hop, default=super().hop)

    @override
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        def on_cpu(payloads: Payload, chunk: Array) -> Array:
            return self.blocks.accumulate(payloads, self._rows, chunk - self.local.first).ravel()

        return lax.platform_dependent(payloads, chunk, cpu=on_cpu, default=super().accumulate)

    @override
    def decompress(self, payloads: Payload) -> Array:
        def on_cpu(payloads: Payload) -> Array:
            return self.blocks.decompress(payloads).ravel()[: self.local.size]

        return lax.platform_dependent(payloads, cpu=on_cpu, default=super().decompress)

    def _hop(self, payloads: Array, chunk: Array, turn: Index) -> Array:
        place = chunk - self.local.first
        return self.blocks.hop(payloads, self._rows, place, chunk, turn, self.seed)

    @property
    def _rows(self) -> Array:
        return self.local.values.reshape(-1, SUPER_GROUP_SIZE)


def rows_per_chunk(size: int, num_chunks: int) -> int:
    """Return the rows of 256 in each of `num_chunks` equal chunks of `size` coordinates."""
    return -(-size // (num_chunks * SUPER_GROUP_SIZE))


def covering_step(spans: Array, levels: int) -> Array:
    """Return the smallest normal bfloat16 of which `levels` steps cover a span.

    It is 0 for a span of 0. If the largest code of a block is the largest possible one, its decoded
    values have the same step again.

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
