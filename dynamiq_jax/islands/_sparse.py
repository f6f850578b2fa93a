"""Sparse messages: the largest coordinates of each block, as their places and signs."""

import dataclasses
from collections.abc import Callable
from typing import cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._core import RecodedChunks, WireCost, check_choice, check_integer, check_number
from dynamiq_jax.islands.messages.sparse import CHUNKS, SparseFormat, magnitudes
from dynamiq_jax.methods import Call, ChunkCodec, ChunkedMethod
from pallas_kernels import native_sparse
from pallas_kernels._jax.compat import match_varying, override
from pallas_kernels._jax.platforms import platform_dependent


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

        return RecodedChunks(
            local=call.local_chunks(values.astype(jnp.float32), self.chunk),
            encode=lambda values, chunk, turn: encoded(values, self.format, self.gain),
            decode=lambda message, chunk: decoded(message, self.format),
        )


def encoded(values: Array, form: SparseFormat, gain: float) -> Array:
    """Encode float32 [size], a multiple of `form.chunk`: uint8, as `form.sections` says."""
    rows = values.reshape(-1, form.chunk)
    size, fields = len(rows) * sum(form.widths), {"keep": form.keep, "bits": form.bits}
    return _by_platform(
        lambda rows: native_sparse.encode(rows, size, **fields, factor=form.factor(gain)),
        lambda rows: encoded_in_jax(rows, form, gain),
        rows,
    )


def decoded(message: Array, form: SparseFormat) -> Array:
    """Decode what `encoded` returns: float32 [size]."""
    shape = message.size // sum(form.widths), form.chunk
    rows = _by_platform(
        lambda message: native_sparse.decode(message, shape, keep=form.keep, bits=form.bits),
        lambda message: decoded_in_jax(message, form),
        message,
    )
    return rows.reshape(-1)


def _by_platform(
    native: Callable[[Array], Array], in_jax: Callable[[Array], Array], values: Array
) -> Array:
    functions = {"default": in_jax} | ({"cpu": native} if native_sparse.is_here() else {})
    return cast(Array, platform_dependent(functions, values))


def encoded_in_jax(rows: Array, form: SparseFormat, gain: float) -> Array:
    """Encode float32 [blocks, chunk] on any platform, as a part of one program: uint8."""
    _, largest = lax.top_k(magnitudes(jnp, rows), form.keep)
    places = jnp.sort(largest, axis=1)
    kept = jnp.take_along_axis(rows, places, axis=1)
    bits = match_varying(jnp.zeros((len(rows), form.high_bits), jnp.uint8), rows)
    block = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    bits = bits.at[block, form.highs(jnp, places)].set(np.uint8(1), unique_indices=True)
    return cast(Array, form.written(jnp, kept, places, bits, gain))


def decoded_in_jax(message: Array, form: SparseFormat) -> Array:
    """Decode on any platform: float32 [blocks, chunk]."""
    blocks = message.size // sum(form.widths)
    scales, packed, lows, codes = form.parts(message, blocks)
    bits = jnp.unpackbits(packed, axis=1, bitorder="little", count=form.high_bits)
    rank = jnp.cumsum(bits, axis=1, dtype=jnp.int32) - 1
    rank = jnp.where(bits != 0, rank, form.keep)  # those beyond are dropped
    block = jnp.arange(blocks, dtype=jnp.int32)[:, None]
    at = jnp.broadcast_to(jnp.arange(form.high_bits, dtype=jnp.int32)[None, :], rank.shape)
    highs = match_varying(jnp.zeros((blocks, form.keep), jnp.int32), rank)
    highs = highs.at[block, rank].set(at, mode="drop")
    places, values = form.kept(jnp, scales, highs, lows, codes)
    rows = match_varying(jnp.zeros((blocks, form.chunk), jnp.float32), values)
    return rows.at[block, places].set(values, mode="drop")
