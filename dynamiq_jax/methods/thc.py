"""THC: integers of all workers on one grid, so that a hop adds them without decoding anything."""

import dataclasses
import functools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.chunks import ChunkCodec, WireCost, as_chunks
from dynamiq_jax.codec import hadamard, packing, scales
from dynamiq_jax.codec.norms import l2_norm
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE, row_bytes
from dynamiq_jax.codec.rounding import offsets
from dynamiq_jax.methods.base import ChunkedMethod

_MIN_BITS, _MAX_BITS = 2, 8  # of one worker's integer: rounding offsets have 16 bits to offer
_MAX_WIRE_BITS = packing.WIDTHS[-1]
_MAX_BLOCK = 2**20
_MIN_CLAMP, _MAX_CLAMP = 1.0, 16.0  # the largest coordinate of a block of 256 is 16 deviations
_MAX_PADDING = 1 / 16  # of a chunk; blocks that would need more are halved


@dataclasses.dataclass(frozen=True, kw_only=True)
class THC(ChunkedMethod):
    """Tensor homomorphic compression (Li, Ben Basat et al., "THC: Accelerating Distributed Deep
    Learning Using Tensor Homomorphic Compression", NSDI 2024, arXiv 2302.08545).

    Blocks are rotated by random signs and a Hadamard transform, after which their coordinates are
    nearly normal. The largest norm that a worker has in a block sets one grid for all workers, of
    `2^bits - 1` integers around 0; values are clamped to it and rounded without bias, each worker
    with noise of its own. The integers are summed as they are, without loss, and the rotation is
    undone once, at the end. The sum has the error of n single roundings on every topology.

    A sum of n workers needs `ceil(log2(2 (2^(bits - 1) - 1) n + 1))` bits, and travels with as many
    on all of its way; at bits=4:

      workers    2  4  8  16  64
      wire bits  5  6  7   8  10

    Clamping is a bias: it takes 2 Q(clamp) of the gradient, Q the tail of the normal distribution,
    and less where the norms of workers differ. The default weighs it against the rounding of a
    wider grid: 2.5 standard deviations and 1.2 % at 4 bits, 3.3 and 0.1 % at 6. A non-finite value,
    or a norm above 2^126, makes its block NaN.

    Differs from the paper in:
      - Sums travel between workers; there is no parameter server or switch that would expand
        integers of `bits` bits. So both ways carry sums, and the width grows with the workers.
      - The grid is uniform. The paper also has tables of unequal steps, looked up at the server.
      - A norm for each block, where the paper has one for each tensor: finer, at 16 bits a block.
      - No error feedback of its own: `ErrorFeedback(method=THC())` has it, and so no bias in time.
    """

    bits: int = 4  # of one worker's integer, -7 .. 7; one more quarters the error
    block: int = 2**14  # coordinates that share a rotation and a grid, a power of two; large blocks
    # cost fewer norms, small ones follow the size of gradients better; halved for small chunks
    clamp: float | None = None  # largest value, in standard deviations of a rotated block: more is
    # less bias and a coarser grid; least error for `bits` if None, 2.5 at 4

    def __post_init__(self):
        if self.bits not in range(_MIN_BITS, _MAX_BITS + 1):  # 4.0 is 4
            raise ValueError(
                f"bits={self.bits!r} is not possible. Give a whole number from {_MIN_BITS} to "
                f"{_MAX_BITS}."
            )
        if (
            type(self.block) is not int
            or not SUPER_GROUP_SIZE <= self.block <= _MAX_BLOCK
            or self.block & (self.block - 1)
        ):
            raise ValueError(
                f"block={self.block!r} is not possible. Give a power of two from "
                f"{SUPER_GROUP_SIZE} to {_MAX_BLOCK}."
            )
        if self.clamp is not None and not (
            isinstance(self.clamp, numbers.Real) and _MIN_CLAMP <= self.clamp <= _MAX_CLAMP
        ):
            raise ValueError(
                f"clamp={self.clamp!r} is not possible. Give {_MIN_CLAMP:g} to {_MAX_CLAMP:g} "
                "standard deviations, or None for those of the least error."
            )

    def wire_bits(self, num_workers: int) -> int:
        """Bits of an integer on the wire: as many as the sum of `num_workers` can need, so that no
        hop overflows.

        Raises:
          ValueError: more than 16.
        """
        bits = (2 * self._largest * num_workers).bit_length()
        if bits > _MAX_WIRE_BITS:
            most = (2**_MAX_WIRE_BITS - 1) // (2 * self._largest)
            raise ValueError(
                f"bits={self.bits} over {num_workers} workers need {bits} bits for a sum, and the "
                f"wire has at most {_MAX_WIRE_BITS}. Use at most {most} workers, fewer bits, or "
                "dq.DynamiQ()."
            )
        return bits

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`. The norms, two bytes a block, are reduced and gathered: twice (n - 1)/n of
        them.
        """
        layout = self._layout(size, num_workers, num_chunks)
        words = num_chunks // num_workers * layout.blocks_per_chunk
        return WireCost(
            payload_bytes=layout.payload_bytes, statistics_bytes=2 * (num_workers - 1) * 2 * words
        )

    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> "_THCChunks":
        """See `ChunkedMethod`. Chunks are consecutive anyway, of whole blocks each."""
        layout = self._layout(flat.size, num_workers, num_chunks)
        blocks = layout.as_blocks(as_chunks(flat.astype(jnp.float32), num_chunks))
        norms = _largest_norms(_norm_words(blocks), axis_name, num_workers)
        return self._chunks(blocks, norms, layout, axis_name, key)

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> "_THCChunks":
        """See `ChunkedMethod`. A part is no sum: its integers travel with `bits` bits."""
        layout = self._layout(num_workers * part.size, 1, num_workers)
        blocks = layout.as_blocks(part.astype(jnp.float32)[None])
        norms = compat.all_gather(_norm_words(blocks), axis_name).reshape(-1)
        return self._chunks(blocks, norms, layout, axis_name, key, is_part=True)

    @property
    def standard_deviations(self) -> float:
        """The clamp in use."""
        return _clamp_of_least_error(self._largest) if self.clamp is None else self.clamp

    @property
    def _largest(self) -> int:
        """Largest integer of one worker."""
        return 2 ** (int(self.bits) - 1) - 1

    def _layout(self, size: int, num_workers: int, num_chunks: int) -> "_Layout":
        chunk_size = -(-size // num_chunks)
        block = self.block
        while block > SUPER_GROUP_SIZE and -chunk_size % block > _MAX_PADDING * chunk_size:
            block //= 2
        return _Layout(
            size=size, num_chunks=num_chunks, block=block, width=self.wire_bits(num_workers)
        )

    def _chunks(
        self,
        blocks: Array,
        norms: Array,
        layout: "_Layout",
        axis_name: str,
        key: Array,
        *,
        is_part: bool = False,
    ) -> "_THCChunks":
        """Codec of local blocks, float32 [blocks, block], and bfloat16 bits of the norms of all
        blocks, uint16 [all blocks].
        """
        step = np.float32(self.standard_deviations / self._largest / math.sqrt(layout.block))
        steps = scales.bfloat16_value(norms.astype(jnp.uint32)) * step
        worker = lax.axis_index(axis_name)
        first = worker if is_part else 0
        mine = lax.dynamic_slice_in_dim(
            steps, first * layout.blocks_per_chunk, blocks.shape[0], axis=0
        )
        sign_key, noise_key = jax.random.split(key)
        signs = hadamard.random_signs(sign_key, layout.block)
        integers = _round(
            hadamard.rotate(blocks, signs) * scales.reciprocal(mine)[:, None],
            self._largest,
            worker,
            jax.random.bits(noise_key, (2,), jnp.uint32),
        )
        return _THCChunks(
            integers=integers.reshape(-1, layout.rows_per_chunk, SUPER_GROUP_SIZE),
            steps=steps.reshape(layout.num_chunks, -1),
            signs=signs,
            layout=layout,
            first=first,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layout:
    """Everything static about a bucket: chunks of whole blocks, blocks of whole rows of 256."""

    size: int  # coordinates of the bucket, before padding
    num_chunks: int
    block: int  # coordinates that are rotated together
    width: int  # bits of an integer on the wire

    @property
    def chunk_size(self) -> int:
        """Coordinates of a chunk, before padding to blocks."""
        return -(-self.size // self.num_chunks)

    @property
    def blocks_per_chunk(self) -> int:
        return -(-self.chunk_size // self.block)

    @property
    def rows_per_chunk(self) -> int:
        return self.blocks_per_chunk * self.block // SUPER_GROUP_SIZE

    @property
    def payload_bytes(self) -> int:
        return self.rows_per_chunk * row_bytes(self.width)

    def as_blocks(self, chunks: Array) -> Array:
        """[chunks, chunk_size] to [blocks, block], each chunk padded with zeros."""
        return jnp.pad(chunks, ((0, 0), (0, -self.chunk_size % self.block))).reshape(-1, self.block)

    def as_values(self, blocks: Array) -> Array:
        """Inverse of `as_blocks`, flat."""
        padded = blocks.reshape(-1, self.blocks_per_chunk * self.block)
        return padded[:, : self.chunk_size].reshape(-1)

    def pack(self, words: Array) -> Array:
        """Low `width` bits of uint16 [rows_per_chunk, 256] to one message, uint8."""
        planes = packing.pack(words, self.width)
        return jnp.concatenate([plane.reshape(-1) for plane in planes])

    def unpack(self, payloads: Array) -> Array:
        """Messages, uint8 [messages, payload_bytes], to uint16 [messages, rows_per_chunk, 256]."""
        planes, start = [], 0
        for bits in packing.planes(self.width):
            stop = start + self.rows_per_chunk * row_bytes(bits)
            planes.append(payloads[:, start:stop].reshape(-1, row_bytes(bits)))
            start = stop
        words = packing.unpack(tuple(planes), planes[0].shape[0], self.width)
        return words.reshape(-1, self.rows_per_chunk, SUPER_GROUP_SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _THCChunks(ChunkCodec):
    """`ChunkCodec` of one bucket. Integers travel in two's complement: their sums need no carry
    beyond `layout.width` bits, and a payload means the same whatever the number of summands.
    """

    integers: Array  # int8 [chunks, rows_per_chunk, 256], of the chunks from `first` on
    steps: Array  # of the grid, float32 [num_chunks, blocks_per_chunk]
    signs: Array  # of the rotation, float32 [block]
    layout: _Layout
    first: Array | int = 0

    def compress(self, chunk: Array, turn: Array | int) -> Array:
        return self.layout.pack(self._local(chunk))

    def hop(self, payloads: Array, chunk: Array, turn: Array | int) -> Array:
        return self.layout.pack(self._sum(payloads, chunk))

    def accumulate(self, payloads: Array, chunk: Array) -> Array:
        steps = lax.dynamic_index_in_dim(self.steps, chunk)
        return self._values(self._sum(payloads, chunk)[None], steps)

    def decompress(self, payloads: Array) -> Array:
        return self._values(self.layout.unpack(payloads), self.steps)[: self.layout.size]

    def once(self, turn: Array | int, num_workers: int) -> "tuple[Array, _THCChunks]":
        words = lax.bitcast_convert_type(self.integers.astype(jnp.int16), jnp.uint16)
        return self._values(words, self.steps)[: self.layout.size], self

    def _local(self, chunk: Array) -> Array:
        integers = lax.dynamic_index_in_dim(self.integers, chunk - self.first, keepdims=False)
        return lax.bitcast_convert_type(integers.astype(jnp.int16), jnp.uint16)

    def _sum(self, payloads: Array, chunk: Array) -> Array:
        """Sums modulo 2^width in the low bits of uint16 [rows_per_chunk, 256]."""
        received = jnp.sum(self.layout.unpack(payloads), axis=0, dtype=jnp.uint16)
        return self._local(chunk) + received

    def _values(self, words: Array, steps: Array) -> Array:
        """Sums, uint16 [chunks, rows_per_chunk, 256], and their steps to float32 values, flat."""
        unused = np.uint16(16 - self.layout.width)
        high = lax.bitcast_convert_type(words << unused, jnp.int16)
        integers = (high >> unused.astype(np.int16)).astype(jnp.float32)
        blocks = integers.reshape(-1, self.layout.block) * steps.reshape(-1, 1)
        return self.layout.as_values(hadamard.unrotate(blocks, self.signs))


def _round(values: Array, largest: int, worker: Array, seed: Array) -> Array:
    """float32 [blocks, block] to integers within `largest`, int8, by unbiased rounding.

    NaN gives any integer: the step of its block says that it is one.
    """
    rows = values.reshape(-1, SUPER_GROUP_SIZE)
    row_ids = jnp.arange(rows.shape[0], dtype=jnp.uint32)
    noise = offsets(row_ids, worker, seed, "independent")
    clamped = jnp.clip(rows, np.float32(-largest), np.float32(largest))
    return jnp.floor(clamped + noise).astype(jnp.int8)


def _norm_words(blocks: Array) -> Array:
    """Norms of blocks, bfloat16 bits rounded up: uint16 [blocks], NaN where a value is not finite
    or the norm is above 2^126.
    """
    norms = lax.bitcast_convert_type(jnp.abs(l2_norm(blocks, axis=1)), jnp.uint32)
    # A norm is no less than any magnitude, but where its computation leaves the range of float32.
    magnitudes = lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32)
    bits = jnp.maximum(norms, jnp.max(magnitudes, axis=1))
    return scales.quantize_super_scales(bits).astype(jnp.uint16)


def _largest_norms(words: Array, axis_name: str, num_workers: int) -> Array:
    """The largest word of all workers for each block, uint16 [blocks].

    As integers, whose order has NaN on top. Reduced by owners and gathered: two bytes a block
    travel, and all workers hold the same bits.
    """
    received = lax.all_to_all(
        words.reshape(num_workers, -1), axis_name, split_axis=0, concat_axis=0
    )
    return compat.all_gather(jnp.max(received, axis=0), axis_name).reshape(-1)


@functools.cache
def _clamp_of_least_error(largest: int) -> float:
    """The clamp, in tenths, with the least squared error of normal coordinates: the variance of the
    rounding and, twice, what is lost beyond. Twice since workers lose it in the same direction: 1.9
    times the sum of squares at 4 bits, where 8 workers have half of their energy in common.
    """
    values = np.linspace(0, 10, 10_001)
    density = np.exp(-(values**2) / 2)

    def error(clamp: float) -> float:
        step = clamp / largest
        share = np.minimum(values, clamp) / step % 1
        lost = np.maximum(values - clamp, 0)
        return float(np.sum((step**2 * share * (1 - share) + 2 * lost**2) * density))

    return float(min(np.arange(10, 61) / 10, key=error))
