"""Marsit: one bit a coordinate, the sign of one worker that is drawn at random."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.methods import Call, ChunkCodec, ChunkedMethod, WireCost
from dynamiq_jax.parts import (
    Payload,
    check_number,
    match_varying,
    override,
    rows_per_chunk,
    take_chunk,
)
from dynamiq_research.packet_loss import ByteSpans, Terms
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, offsets, packing, row_bytes
from pallas_kernels.codec.scales import bfloat16_bits, bfloat16_value

_WEIGHT_BYTES = 2  # of a message, uint16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marsit(ChunkedMethod):
    """One bit a coordinate: at every hop, the sign of one of the workers so far, at random.

    Paper: Wu et al., "Sign Bit is Enough: A Learning Synchronization Framework for Multi-hop
    All-reduce with Ultimate Compression", DAC 2022, arXiv 2204.06787.

    A message holds one sign for each coordinate, and its weight: the number of workers that it
    stands for. A hop merges two messages of weights v and w. Each coordinate independently takes
    the sign of the second one with the probability w / (v + w). So the last sign is that of one
    worker, each as likely, on every topology. It is positive with the probability f, the share of
    workers with a positive value. The sum is the number of workers times the scale times that sign.

    The scale of 256 coordinates is the mean magnitude of all workers there. It is exchanged once,
    as bfloat16, which makes 1.06 bits a coordinate in all. A reduce-scatter adds up the signs that
    a worker receives, and an all-gather has only one worker's signs.

    The sum is unbiased for the scale times the sum of signs, not for the sum of gradients: put it
    inside `ErrorFeedback`, which recovers magnitudes over steps. Its variance, 4 f (1 - f) times
    the square of the scale for the mean, does not fall with the number of workers.

    Of zeros, half of the workers count as positive; which half depends on the key and the
    coordinate. A row of zeros stays zero. NaN or Inf make their row of 256 NaN.

    Differs from the paper, of which only the abstract was read, in:
      - The scale is measured. The paper applies signs with one constant step; `scale` sets one.
        Rows of zeros then move too, and NaN or Inf make their whole chunk NaN.
      - Weights travel with the messages, where a ring could count its hops: so any topology works.
      - No compensation of its own: `ErrorFeedback(inner=Marsit())` keeps what each worker's signs
        leave out. `GlobalCompensation(inner=Marsit())` is the paper's.

    >>> Marsit().scale is None
    True
    >>> Marsit(scale=0)
    Traceback (most recent call last):
    ...
    ValueError: scale=0 is out of range. Give 1e-30 to 1e30, or None.
    """

    scale: float | None = None  # magnitude of a worker's values: a constant that is not sent; None:
    # the mean magnitude of each row of 256, which follows the gradients and costs 0.06 bits

    def __post_init__(self):
        if self.scale is not None:
            check_number("scale", self.scale, 1e-30, 1e30, "1e-30 to 1e30, or None")

    @override
    def wire_cost(self, call: Call) -> WireCost:
        rows = rows_per_chunk(call.size, call.num_chunks)
        message = rows * row_bytes(1) + _WEIGHT_BYTES
        if self.scale is not None:
            return WireCost(message)
        means = 2 * rows  # bytes, of bfloat16
        returned = 0 if call.collective == "all_gather" else means
        return WireCost(message, call.axis.owners_bytes(means, returned))

    @override
    def bind(self, values: Array, call: Call, key: Array) -> "_SignChunks":
        local = call.local_chunks(values, SUPER_GROUP_SIZE)
        rows = local.values.reshape(-1, SUPER_GROUP_SIZE).astype(jnp.float32)
        held = len(local.values)
        words = jax.random.bits(key, (3,), jnp.uint32)
        signs = _sign_bits(rows, call.axis.index.astype(jnp.uint32) + words[2])
        weights = jnp.ones((held, 1), jnp.uint16)
        if self.scale is not None:  # no statistics tell the others of NaN
            is_finite = jnp.all(jnp.isfinite(rows).reshape(held, -1), axis=1, keepdims=True)
            weights = is_finite.astype(jnp.uint16)
        return _SignChunks(
            own=match_varying(_Message(signs.reshape(held, -1), weights), values),
            scales=self._scales(rows, values.size, call),
            seed=words[:2],
            size=local.size,
            num_workers=call.num_workers,
            first=local.first,
        )

    def _scales(self, rows: Array, size: int, call: Call) -> Array:
        """Return the scales of all chunks, float32 [num_chunks, rows], the same on all workers.

        Rows are float32 [rows, 256], of which `size` coordinates are not padding.
        """
        if self.scale is not None:
            shape = call.num_chunks, rows_per_chunk(call.size, call.num_chunks)
            return jnp.full(shape, self.scale, jnp.float32)
        # Divided before they are added up: sums of 1e38 would overflow.
        means = jnp.sum(jnp.abs(rows) * np.float32(1 / SUPER_GROUP_SIZE), axis=1)
        last, coordinates = divmod(size, SUPER_GROUP_SIZE)
        if coordinates:  # padding has no part in the mean
            means = means.at[last].multiply(np.float32(SUPER_GROUP_SIZE / coordinates))
        words = bfloat16_bits(means)
        if call.collective == "all_gather":
            words = call.axis.gather(words)
        else:
            words = call.axis.reduce_by_owners(words.reshape(call.num_workers, -1), _mean)
        return bfloat16_value(words).reshape(call.num_chunks, -1)


class _Message(NamedTuple):
    """Signs of some workers, and the number of these workers."""

    signs: Array  # uint8 [32 rows]
    weight: Array  # uint16 [1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SignChunks(ChunkCodec, Terms):
    """Codec of signs: hops merge messages, and nothing is decoded before the end.

    A message holds signs, uint8 [32 rows], a bit for each coordinate that is 1 if positive; and
    its weight, uint16 [1], which is 0 if a value of any of its workers is not finite. On the wire
    both are one array of bytes, since each array would be a collective of its own.
    """

    own: _Message  # of this worker alone, stacked, of the chunks from `first` on
    scales: Array  # float32 [chunks, rows], of all chunks
    seed: Array  # uint32 [2], the same on all workers
    size: int  # coordinates of the bucket, before padding
    num_workers: int
    first: Index

    @override
    def compress(self, chunk: Array, turn: Index) -> Payload:
        return _joined(self._own(chunk))

    @override
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Payload:
        rows = self.scales.shape[1]
        rows_before = jnp.asarray(chunk).astype(jnp.uint32) * np.uint32(rows)
        row_ids = rows_before + jnp.arange(rows, dtype=jnp.uint32)
        # There are fewer merges in a turn than workers: each merge of a chunk has its own number.
        first_number = jnp.asarray(turn).astype(jnp.uint32) * np.uint32(self.num_workers)

        def merge(before: _Message, newcomer: _Message, number: Index) -> _Message:
            number = first_number + jnp.asarray(number).astype(jnp.uint32)
            noise = jnp.asarray(offsets(row_ids, number, self.seed, "independent"))
            return _merge(before, newcomer, noise)

        def merge_received(number: Array, merged: _Message) -> _Message:
            return merge(merged, _parts(take_chunk(payloads, number)), number)

        merged = lax.fori_loop(1, len(payloads), merge_received, _parts(payloads[0]))
        return _joined(merge(merged, self._own(chunk), 0))

    @override
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        # Sums of weights are whole numbers: exact, in any order.
        votes = jnp.sum(jax.vmap(_votes)(_parts(payloads)), axis=0) + _votes(self._own(chunk))
        return (votes * take_chunk(self.scales, chunk)[:, None]).reshape(-1)

    @override
    def local_terms(self, chunk: Array) -> Array:
        return self.terms(self.compress(chunk, 0), chunk)

    @override
    def terms(self, payload: Payload, chunk: Array) -> Array:
        return (_votes(_parts(payload)) * take_chunk(self.scales, chunk)[:, None]).reshape(-1)

    @override
    def byte_spans(self, chunk: Array) -> ByteSpans:
        rows = self.scales.shape[1]
        signs = ByteSpans.of_sections(rows, (row_bytes(1),))
        weight = jnp.full((rows, 1), rows * row_bytes(1), jnp.int32)  # the same for all rows
        return ByteSpans(
            jnp.concatenate([signs.starts, weight], axis=1),
            jnp.concatenate([signs.stops, weight + _WEIGHT_BYTES], axis=1),
            signs.size + rows * _WEIGHT_BYTES,
        )

    @override
    def decompress(self, payloads: Payload) -> Array:
        return self._decode(_parts(payloads), self.scales)

    @override
    def rounded(self, turn: Index) -> "tuple[Array, _SignChunks]":
        held = len(self.own.signs)
        return self._decode(self.own, lax.dynamic_slice_in_dim(self.scales, self.first, held)), self

    def _own(self, chunk: Array) -> _Message:
        return jax.tree.map(lambda leaf: take_chunk(leaf, chunk - self.first), self.own)

    def _decode(self, messages: _Message, scales: Array) -> Array:
        votes = jax.vmap(_votes)(messages)
        return (votes * scales[:, :, None]).reshape(-1)[: self.size]


def _sign_bits(rows: Array, zeros: Array) -> Array:
    """Pack the signs of float32 [rows, 256], uint8 [32 rows].

    Zeros count as positive in every other lane, which ones by the lowest bit of `zeros`. Always
    positive, the zeros of workers that have no gradient would outvote those that have one.
    """
    lanes = jnp.arange(SUPER_GROUP_SIZE, dtype=jnp.uint32)
    of_zero = (lanes + zeros) & np.uint32(1) != 0
    is_positive = jnp.where(rows == 0, of_zero, rows > 0)
    return _pack(is_positive)


def _merge(before: _Message, newcomer: _Message, noise: Array) -> _Message:
    """Merge two messages, with noise in (0, 1), float32 [rows, 256]."""
    (signs, weight), (new_signs, new_weight) = before, newcomer
    total = weight + new_weight
    share = new_weight.astype(jnp.float32) / total.astype(jnp.float32)
    is_new = _pack(noise < share[:, None])
    is_finite = (weight > 0) & (new_weight > 0)
    merged = (signs & ~is_new) | (new_signs & is_new)
    return _Message(merged, jnp.where(is_finite, total, np.uint16(0)))


def _joined(message: _Message) -> Array:
    """Return a message as bytes, uint8 [32 rows + 2]."""
    return jnp.concatenate([message.signs, lax.bitcast_convert_type(message.weight, jnp.uint8)[0]])


def _parts(payloads: Array) -> _Message:
    """Invert `_joined`, of one message or of several, stacked."""
    signs, weight = jnp.split(payloads, [payloads.shape[-1] - _WEIGHT_BYTES], axis=-1)
    return _Message(signs, lax.bitcast_convert_type(weight, jnp.uint16)[..., None])


def _votes(message: _Message) -> Array:
    """Return weight or minus weight of each coordinate, float32 [rows, 256]; NaN if it is 0."""
    signs, weight = message
    rows = signs.size // row_bytes(1)
    is_positive = packing.unpack(signs, rows, 1).reshape(rows, SUPER_GROUP_SIZE) != 0
    size = jnp.where(weight > 0, weight.astype(jnp.float32), np.float32(np.nan))
    return jnp.where(is_positive, size, -size)


def _pack(flags: Array) -> Array:
    """Pack booleans [rows, 256] to bits, uint8 [32 rows]."""
    return packing.pack(flags.astype(jnp.uint16), 1)[0]


def _mean(words: Array) -> Array:
    """Return the mean of bits of bfloat16 over the first axis, as such bits again."""
    values = bfloat16_value(words)
    return bfloat16_bits(jnp.sum(values * np.float32(1 / len(values)), axis=0))
