"""THC: integers of all workers on one grid, so that a hop adds them without decoding anything."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.methods import Call, ChunkedMethod, SummedChunks, WireCost
from dynamiq_jax.parts import check_choice, check_integer, check_number, override
from dynamiq_research.thc import hadamard
from pallas_kernels.codec import SUPER_GROUP_SIZE, l2_norm, offsets, packing, row_bytes, scales

_MAX_WIRE_BITS = packing.WIDTHS[-1]
_BLOCKS = tuple(2**bits for bits in range(8, 21))
_KEY_BYTES = 4  # that a worker sends beside norms: all see whether their keys differ
_KEY_SALT = 0x6B6579
_MAX_PADDING = 1 / 16  # of a chunk; blocks that would need more are halved


@dataclasses.dataclass(frozen=True, kw_only=True)
class THC(ChunkedMethod):
    """Tensor homomorphic compression: integers that are summed without decoding them.

    Paper: Li, Ben Basat et al., "THC: Accelerating Distributed Deep Learning Using Tensor
    Homomorphic Compression", NSDI 2024, arXiv 2302.08545.

    Blocks are rotated by random signs and a Hadamard transform, after which their coordinates are
    nearly normal. The largest norm that a worker has in a block sets one grid for all workers, of
    `2^code_bits - 1` integers around 0. Values are clamped to it and rounded without bias, each
    worker with noise of its own. The integers are summed without loss, and the rotation is undone
    once, at the end. The sum has the error of n single roundings on every topology.

    A sum of n workers needs `ceil(log2(2 (2^(code_bits - 1) - 1) n + 1))` bits, and has that
    width in every message; at code_bits=4:

      workers    2  4  8  16  64
      wire bits  5  6  7   8  10

    Clamping is a bias: it takes 2 Q(clamp) of the gradient, Q the tail of the normal distribution,
    and less where the norms of workers differ. The default weighs it against the rounding of a
    wider grid: 2.5 standard deviations and 1.2 % at 4 bits, 3.3 and 0.1 % at 6. A non-finite value,
    or a norm above 8.47e37, makes its block NaN. Keys that differ between workers make everything
    NaN, on all of them: 4 bytes of a hash travel with the norms.

    With `sum_bits`, sums have fewer bits, and saturate at every hop ("Beyond Throughput and
    Compression Ratios", arXiv 2407.01378). The integers of one worker deviate by 2.8 at 4 bits, and
    sums of n workers by 2.8 n sqrt(a + (1 - a) / n), if they have the share a of their energy in
    common. Give bits for three deviations: up to 2^(sum_bits - 1). Where workers are independent,
    this saves up to 3 bits at 64 workers. Where they agree, it destroys the sum: at 8 workers with
    a = 1/2, one bit less takes 4 times the error, and two bits less 35 times. What saturates
    belongs to no worker, so error feedback does not recover it.

    Differs from the paper in:
      - Sums travel between workers; no parameter server or switch expands integers of `code_bits`
        bits. So both ways carry sums, and the width grows with the workers.
      - The grid is uniform. The paper also has tables of unequal steps, looked up at the server.
      - A norm for each block, where the paper has one for each tensor: finer, at 16 bits a block.
      - No error feedback of its own: `ErrorFeedback(inner=THC())` adds it, and removes the bias
        over time.
    """

    code_bits: int = 4  # of one worker's integer, -7 .. 7; one more quarters the error
    block: int = 2**14  # coordinates that share a rotation and a grid, a power of two; large blocks
    # cost fewer norms, small ones follow the size of gradients better; halved for small chunks
    sum_bits: int | None = None  # of a sum on the wire: fewer saturate; None: as many as sums need
    clamp: float | None = None  # largest value, in standard deviations of a rotated block: more is
    # less bias and a coarser grid; least error for `code_bits` if None, 2.5 at 4

    def __post_init__(self):
        check_integer("code_bits", self.code_bits, 2, 8)  # rounding offsets have 16 bits
        check_choice("block", self.block, _BLOCKS)
        if self.sum_bits is not None:  # less would saturate single integers
            check_integer("sum_bits", self.sum_bits, self.code_bits, _MAX_WIRE_BITS)
        if self.clamp is not None:  # the largest coordinate of a block of 256 is 16 deviations
            check_number("clamp", self.clamp, 1, 16, "1 to 16 standard deviations, or None")

    def wire_bits(self, num_workers: int) -> int:
        """Return the bits of an integer on the wire: those of a sum of `num_workers` or `sum_bits`.

        Raises:
          ValueError: sums need more than 16.
        """
        bits = (2 * self.largest * num_workers).bit_length()
        if bits > _MAX_WIRE_BITS:
            most = (2**_MAX_WIRE_BITS - 1) // (2 * self.largest)
            raise ValueError(
                f"code_bits={self.code_bits} over {num_workers} workers need {bits} bits for a "
                f"sum, and the wire has at most {_MAX_WIRE_BITS}. Use at most {most} workers, "
                "fewer bits, or dq.DynamiQ()."
            )
        return bits if self.sum_bits is None else min(bits, self.sum_bits)

    @property
    def standard_deviations(self) -> float:
        """The clamp in use."""
        return _clamp_of_least_error(self.largest) if self.clamp is None else self.clamp

    @override
    def wire_cost(self, call: Call) -> WireCost:
        layout = self.layout(call)
        norms = 2 * layout.blocks_per_chunk
        if call.collective == "all_gather":
            statistics = (call.num_workers - 1) * (norms + _KEY_BYTES)
        else:
            statistics = call.axis.owners_bytes(norms + _KEY_BYTES, norms)
        return WireCost(layout.payload_bytes, statistics)

    @override
    def bind(self, values: Array, call: Call, key: Array) -> SummedChunks:
        layout, local = self.layout(call), call.local_chunks(values.astype(jnp.float32))
        blocks = layout.as_blocks(local.values)
        norms = _shared_norms(_norm_words(blocks), call, key)
        step = np.float32(self.standard_deviations / self.largest / math.sqrt(layout.block))
        steps = scales.bfloat16_value(norms).reshape(layout.num_chunks, -1) * step
        mine = lax.dynamic_slice_in_dim(steps, local.first, len(local.values)).reshape(-1, 1)
        sign_key, noise_key = jax.random.split(key)
        signs = hadamard.random_signs(sign_key, layout.block)
        integers = _round(
            hadamard.rotate(blocks, signs) * scales.reciprocal(mine),
            self.largest,
            call.axis.index,
            jax.random.bits(noise_key, (2,), jnp.uint32),
        )

        def decode(sums: Array, chunk: Array | None) -> Array:
            of_sums = steps if chunk is None else lax.dynamic_index_in_dim(steps, chunk)
            return layout.as_values(sums, of_sums, signs)

        return SummedChunks(
            encoded=integers.reshape(-1, layout.rows_per_chunk, SUPER_GROUP_SIZE),
            decode=decode,
            size=local.size,
            first=local.first,
            pack=layout.pack,
            unpack=layout.unpack,
        )

    @property
    def largest(self) -> int:
        """Largest integer of one worker."""
        return 2 ** (self.code_bits - 1) - 1

    def layout(self, call: Call) -> "BlockLayout":
        """Return the static layout of a bucket."""
        chunk_size = -(-call.size // call.num_chunks)
        block = self.block
        while block > SUPER_GROUP_SIZE and -chunk_size % block > _MAX_PADDING * chunk_size:
            block //= 2
        # A gathered part is not a sum: its integers have the bits of one worker's.
        summands = 1 if call.collective == "all_gather" else call.num_workers
        return BlockLayout(chunk_size, call.num_chunks, block, self.wire_bits(summands))


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """All that is static about a bucket: chunks of whole blocks, blocks of whole rows of 256."""

    chunk_size: int  # coordinates of a chunk, before padding to blocks
    num_chunks: int
    block: int  # coordinates that are rotated together
    width: int  # bits of an integer on the wire

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a chunk, padding included."""
        return -(-self.chunk_size // self.block)

    @property
    def rows_per_chunk(self) -> int:
        """Rows of 256 of a chunk."""
        return self.blocks_per_chunk * self.block // SUPER_GROUP_SIZE

    @property
    def payload_bytes(self) -> int:
        """Bytes of a message."""
        return self.rows_per_chunk * row_bytes(self.width)

    def as_blocks(self, chunks: Array) -> Array:
        """Reshape [chunks, chunk_size] to [blocks, block], each chunk padded with zeros."""
        return jnp.pad(chunks, ((0, 0), (0, -self.chunk_size % self.block))).reshape(-1, self.block)

    def as_values(self, sums: Array, steps: Array, signs: Array) -> Array:
        """Decode sums, int16 or float32 [chunks, rows_per_chunk, 256], to float32 values, flat."""
        blocks = sums.astype(jnp.float32).reshape(-1, self.block) * steps.reshape(-1, 1)
        padded = hadamard.unrotate(blocks, signs).reshape(-1, self.blocks_per_chunk * self.block)
        return padded[:, : self.chunk_size].reshape(-1)

    def pack(self, sums: Array) -> Array:
        """Pack int16 [rows_per_chunk, 256] to one message, uint8; larger ones saturate.

        They are in two's complement: a payload means the same for any number of summands.
        """
        largest = np.int16(2 ** (self.width - 1) - 1)
        words = lax.bitcast_convert_type(jnp.clip(sums, -largest, largest), jnp.uint16)
        return jnp.concatenate(packing.pack(words, self.width))

    def unpack(self, payloads: Array) -> Array:
        """Invert `pack` for several messages: int16 [messages, rows_per_chunk, 256]."""
        rows, unused = self.rows_per_chunk, 16 - self.width
        words = jax.vmap(lambda payload: packing.unpack(payload, rows, self.width))(payloads)
        high = lax.bitcast_convert_type(words << np.uint16(unused), jnp.int16)
        return (high >> np.int16(unused)).reshape(-1, rows, SUPER_GROUP_SIZE)


def _round(values: Array, largest: int, worker: Array, seed: Array) -> Array:
    """Round float32 [blocks, block] without bias to integers within `largest`, int16.

    NaN gives any integer: the step of its block is NaN.
    """
    rows = values.reshape(-1, SUPER_GROUP_SIZE)
    row_ids = jnp.arange(rows.shape[0], dtype=jnp.uint32)
    noise = offsets(row_ids, worker, seed, "independent")
    clamped = jnp.clip(rows, np.float32(-largest), np.float32(largest))
    return jnp.floor(clamped + noise).astype(jnp.int16)


def _shared_norms(norms: Array, call: Call, key: Array) -> Array:
    """Return the norms of all blocks, the same on all workers: uint16 [owners, blocks of each].

    They are the largest ones of all workers, or those of the parts that an all-gather joins. All
    are NaN if keys differ: workers would undo rotations of others, and have different results.
    """
    words = jax.random.bits(jax.random.fold_in(key, _KEY_SALT), (_KEY_BYTES // 2,), jnp.uint16)
    num_words = words.size

    def checked(norms: Array, words: Array) -> Array:
        return jnp.where(jnp.all(words == words[:1]), norms, scales.NAN_BITS.astype(np.uint16))

    if call.collective == "all_gather":
        gathered = call.axis.gather(jnp.concatenate([norms, words]))
        norms, words = jnp.split(gathered, [norms.size], axis=1)
        return checked(norms, words)

    def combine(shares: Array) -> Array:  # as integers, whose order has NaN on top
        norms, words = jnp.split(shares, [shares.shape[1] - num_words], axis=1)
        return checked(jnp.max(norms, axis=0), words)

    shares = norms.reshape(call.num_workers, -1)
    words = jnp.broadcast_to(words, (call.num_workers, num_words))
    return call.axis.reduce_by_owners(jnp.concatenate([shares, words], axis=1), combine)


def _norm_words(blocks: Array) -> Array:
    """Compute norms of blocks, rounded up to bits of bfloat16: uint16 [blocks].

    They are NaN where a value is not finite or the norm is above 8.47e37.
    """
    norms = lax.bitcast_convert_type(jnp.abs(l2_norm(blocks, axis=1)), jnp.uint32)
    # A norm is at least every magnitude, unless its computation leaves the range of float32.
    magnitudes = lax.bitcast_convert_type(jnp.abs(blocks), jnp.uint32)
    bits = jnp.maximum(norms, jnp.max(magnitudes, axis=1))
    return scales.quantize_super_scales(bits).astype(jnp.uint16)


@functools.cache
def _clamp_of_least_error(largest: int) -> float:
    """Return the clamp, in tenths, with the least squared error of normal coordinates.

    The error is the variance of the rounding and, twice, the square of what is lost beyond the
    clamp. Twice because workers lose it in the same direction: 1.9 times the sum of squares at 4
    bits, where 8 workers have half of their energy in common.
    """
    values = np.linspace(0, 10, 10_001)
    density = np.exp(-(values**2) / 2)

    def error(clamp: float) -> float:
        step = clamp / largest
        share = np.minimum(values, clamp) / step % 1
        lost = np.maximum(values - clamp, 0)
        return float(np.sum((step**2 * share * (1 - share) + 2 * lost**2) * density))

    return float(min(np.arange(10, 61) / 10, key=error))
