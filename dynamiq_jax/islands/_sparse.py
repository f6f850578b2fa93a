"""Sparse messages: the largest coordinates of each block, as their places and signs."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._core import RecodedChunks, WireCost, check_choice, check_integer, check_number
from dynamiq_jax.islands.messages.sparse import CHUNKS, SparseFormat
from dynamiq_jax.methods import Call, ChunkCodec, ChunkedMethod
from pallas_kernels._jax.compat import match_varying, override
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.scales import bfloat16_bits, bfloat16_value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse(ChunkedMethod):
    """The `keep` largest of each block of `chunk` coordinates, for the messages of islands.

    Each island sends its own largest coordinates, so that nothing but their sum is dense. What it
    leaves out has to be added to its next change: `Islands(feedback=True)`. Without that, most of a
    change is lost.

    A value is the sign and the mean magnitude of its block with one bit; with more bits, an odd
    multiple of a part of its largest magnitude. The defaults take 0.25 bits a coordinate.
    SparseLoCo (arXiv 2508.15706, section 3) has `keep=64, bits=2, gain=1`, which take 0.16 bits
    here and 0.22 there: places are coded in fewer bits.

    NaN or Inf make all that is kept of their block NaN.

    >>> Sparse().bits_a_coordinate, Sparse(keep=64, bits=2).bits_a_coordinate
    (0.25, 0.16015625)
    """

    keep: int = 124
    chunk: int = 4096  # a power of two, from 256 to 65,536
    bits: int = 1  # of a value, 1 to 4
    # Factor of all values that are sent. What is too much is taken back by the next change: then a
    # coordinate that is sent once in some rounds moves for the rounds between, too.
    gain: float = 1.25

    def __post_init__(self):
        check_choice("chunk", self.chunk, CHUNKS)
        check_integer("keep", self.keep, 1, self.chunk // 2)
        check_integer("bits", self.bits, 1, 4)
        check_number("gain", self.gain, 0.5, 2)

    @property
    def format(self) -> SparseFormat:
        """The bytes of a bucket."""
        fields = int(self.keep), int(self.chunk), int(self.bits)
        return SparseFormat(method="sparse", keep=fields[0], chunk=fields[1], bits=fields[2])

    @property
    def bits_a_coordinate(self) -> float:
        """Bits of a coordinate, with everything but the header of a message."""
        return 8 * sum(self.format.widths) / self.chunk

    @property
    @override
    def granule(self) -> int:
        return self.chunk

    @override
    def wire_cost(self, call: Call) -> WireCost:
        size = -(-call.size // call.num_chunks)
        return WireCost(self.format.blocks(size) * sum(self.format.widths))

    @override
    def bind(self, values: Array, call: Call, key: Array) -> ChunkCodec:
        if call.collective != "all_gather":
            raise ValueError(
                f"method={self!r} is for messages, which nothing adds up before they are decoded. "
                "Use it in islands.encode and islands.Islands, or give dq.DynamiQ(bits=4.0)."
            )

        def encode(chunk: Array, place: Array, turn: Index) -> Array:
            return encoded(chunk, self.format, self.gain)

        def decode(message: Array, place: Array) -> Array:
            return decoded(message, self.format)

        local = call.local_chunks(values.astype(jnp.float32), self.chunk)
        return RecodedChunks(local=local, encode=encode, decode=decode)


def encoded(values: Array, form: SparseFormat, gain: float) -> Array:
    """Encode float32 [size], a multiple of `form.chunk`: uint8, as `form.sections` says."""
    rows = values.reshape(-1, form.chunk)
    sizes = jnp.where(jnp.isnan(rows), np.float32(np.inf), jnp.abs(rows))
    _, largest = lax.top_k(sizes, form.keep)
    places = jnp.sort(largest, axis=1)
    kept = jnp.take_along_axis(rows, places, axis=1)
    magnitudes, levels = jnp.abs(kept), 2 ** (form.bits - 1)
    if levels == 1:
        scale = jnp.mean(magnitudes, axis=1)
    else:
        scale = jnp.max(magnitudes, axis=1) * np.float32(0.5 / levels)
    steps = jnp.ceil(magnitudes / (2 * scale)[:, None])
    scale = scale * np.float32(gain)
    scale = jnp.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    scale_bits = bfloat16_bits(scale)
    index = jnp.clip(jnp.nan_to_num(steps, nan=1), 1, levels).astype(jnp.int32) - 1
    high = (places >> form.low_bits) + jnp.arange(form.keep, dtype=jnp.int32)[None, :]
    bits = jnp.zeros((len(rows), form.high_bits), jnp.uint8)
    bits = match_varying(bits, high)
    bits = bits.at[jnp.arange(len(rows))[:, None], high].set(np.uint8(1), unique_indices=True)
    parts = (
        lax.bitcast_convert_type(scale_bits, jnp.uint8),
        _packed(bits, 1),
        _packed(places & np.int32(2**form.low_bits - 1), form.low_bits),
        _packed(index << 1 | jnp.signbit(kept).astype(jnp.int32), form.bits),
    )
    return jnp.concatenate([part.reshape(-1) for part in parts])


def decoded(message: Array, form: SparseFormat) -> Array:
    """Decode what `encoded` returns: float32 [size]."""
    blocks = message.size // sum(form.widths)
    ends = np.cumsum([blocks * width for width in form.widths])[:-1]
    pieces = zip(jnp.split(message, ends), form.widths, strict=True)
    scales, highs, lows, codes = (piece.reshape(blocks, width) for piece, width in pieces)
    block = jnp.arange(blocks, dtype=jnp.int32)[:, None]
    bits = _unpacked(highs, form.high_bits, 1)
    rank = jnp.where(bits != 0, jnp.cumsum(bits, axis=1) - 1, form.keep)  # those beyond are dropped
    at = jnp.broadcast_to(jnp.arange(form.high_bits, dtype=jnp.int32)[None, :], rank.shape)
    found = match_varying(jnp.zeros((blocks, form.keep), jnp.int32), rank)
    found = found.at[block, rank].set(at, mode="drop")
    steps = found - jnp.arange(form.keep, dtype=jnp.int32)[None, :]
    places = steps << form.low_bits | _unpacked(lows, form.keep, form.low_bits)
    numbers = _unpacked(codes, form.keep, form.bits)
    odd = (numbers >> 1 << 1 | 1).astype(jnp.float32)
    scale = bfloat16_value(lax.bitcast_convert_type(scales, jnp.uint16))
    # As readers without JAX do. No encoder writes such a scale.
    is_tiny = jnp.abs(scale) < np.finfo(np.float32).tiny
    scale = jnp.where(is_tiny, jnp.copysign(np.float32(0), scale), scale)
    signed = jnp.where(numbers & 1 != 0, -odd, odd) * scale[:, None]
    rows = match_varying(jnp.zeros((blocks, form.chunk), jnp.float32), signed)
    return rows.at[block, places].set(signed, mode="drop").reshape(-1)


def _packed(fields: Array, width: int) -> Array:
    """Pack integers [blocks, count] of some bits, the lowest first: uint8 [blocks, bytes]."""
    shifts = jnp.arange(width, dtype=fields.dtype)
    bits = (fields[:, :, None] >> shifts[None, None, :]) & fields.dtype.type(1)
    bits = bits.reshape(len(fields), -1).astype(jnp.uint8)
    whole = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % 8))).reshape(len(fields), -1, 8)
    return jnp.sum(whole << jnp.arange(8, dtype=jnp.uint8)[None, None, :], axis=2, dtype=jnp.uint8)


def _unpacked(data: Array, count: int, width: int) -> Array:
    """Invert `_packed`: int32 [blocks, count]."""
    bits = (data[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)[None, None, :]) & np.uint8(1)
    bits = bits.reshape(len(data), -1)[:, : count * width].reshape(len(data), count, width)
    shifts = jnp.arange(width, dtype=jnp.int32)[None, None, :]
    return jnp.sum(bits.astype(jnp.int32) << shifts, axis=2, dtype=jnp.int32)
