"""Entropy coding of the integers that THC sums, after the abstract of OSCAR-HW (HPCA 2026)."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.methods import Call, ChunkCodec, ChunkedMethod, SummedChunks, WireCost
from dynamiq_jax.parts import Payload, check_choice, check_number, override, take_chunk
from dynamiq_jax.topologies import AllToAll, Ring, Topology
from dynamiq_research.entropy_coded.integer_coders import (
    CoarseCoder,
    IntegerCoder,
    PatchedCoder,
    PlainCoder,
)
from dynamiq_research.entropy_coded.rans import RansCoder
from dynamiq_research.packet_loss import Terms
from dynamiq_research.thc import THC
from pallas_kernels.codec import Index, offsets

Coder = Literal["rans", "patched"]

_HEADER_BYTES = 4  # is the body coarse; how full it is, in 1/200; messages so far that were coarse
_FULL = np.float32(200)
_CLAMPED = 0.97  # of the energy of normal coordinates that is left by the clamp of least error
_NOISE = 0x636F6172  # folded into the key of the coarse rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyCoded(ChunkedMethod):
    """THC whose sums are sent in about as many bits as they have entropy. The sums are the same.

    THC sends every partial sum in the bits that the largest possible final one needs: 10 for 64
    workers. Most are far smaller, and those of early turns smaller still. Here every turn has a
    code of its own, for the distribution that its sums are expected to have; both sides know it,
    and no table is sent. After the abstract of OSCAR (Majhi, Laskar, Muzahid, Kim, HPCA 2026),
    whose hardware codes fixed-point gradients with a probability table for each timestep of an
    all-reduce. Everything beyond that is ours.

    XLA requires messages of a static size: a budget. It is that of normal coordinates of which the
    workers have the share `agreement` of their energy in common, and 1 % more. Integers that do not
    fit are sent coarser, without bias: with as many low bits dropped as a fixed width requires. The
    header of the message says so. Two metrics tell: `coarse` is the share of messages to which it
    happened, and `filled` the largest share of the budget that a final sum takes. Give more
    `agreement` where `coarse` is not 0, and less where `filled` is far below 1.

    Turns have messages of different sizes on an all-to-all and on `Ring(unroll=True)`. On the other
    topologies, all messages have the size of the last turn's.

    Coders:
      rans: within about 2 % of the entropy for messages of 100,000 coordinates or more. Decoding
        takes 512 dependent steps or more, which is slow on a GPU.
      patched: one width for most integers, and a list of those beyond. Half a bit to one bit more,
        and as fast as packing.
    """

    inner: THC = dataclasses.field(default_factory=THC)  # whose integers are coded
    agreement: float = 0.5  # share of the energy that workers have in common, at most; sets budgets
    coder: Coder = "rans"

    def __post_init__(self):
        if not isinstance(self.inner, THC) or self.inner.sum_bits is not None:
            raise ValueError(
                f"inner={self.inner!r} has no sums of integers without loss. Give a THC without "
                "sum_bits, such as dynamiq_research.THC(code_bits=4)."
            )
        check_number("agreement", self.agreement, 0, 1, "a share of the energy, 0 to 1")
        check_choice("coder", self.coder, get_args(Coder))

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return ("coarse", "filled")

    @override
    def wire_cost(self, call: Call) -> WireCost:
        codes, n = self._codes(call), call.num_workers
        last = codes(1 if call.collective == "all_gather" else n).num_bytes
        cost = WireCost(last, self.inner.wire_cost(call).statistics_bytes)
        if call.collective == "all_gather" or not _has_static_turns(call.topology):
            return cost
        saved = sum(
            count * (last - codes(workers).num_bytes)
            for count, workers in call.topology.compressions(n)[:-1]
        )
        return CostByTurn(cost.payload_bytes, cost.statistics_bytes, saved)

    @override
    def bind(self, values: Array, call: Call, key: Array) -> "CodedChunks":
        noise = jax.random.bits(jax.random.fold_in(key, _NOISE), (2,), jnp.uint32)
        is_part = call.collective == "all_gather"
        return CodedChunks(
            summed=self.inner.bind(values, call, key),
            codes=self._codes(call),
            largest=self.inner.largest,
            num_workers=1 if is_part else call.num_workers,
            has_static_turns=is_part or _has_static_turns(call.topology),
            seed=noise,
        )

    @override
    def measure(self, payloads: Payload, call: Call) -> Mapping[str, Array]:
        filled, coarse = payloads[:, 1], lax.bitcast_convert_type(payloads[:, 2:4], jnp.uint16)
        messages = np.float32(payloads.shape[0] * call.num_workers)
        return {
            "coarse": jnp.sum(coarse.astype(jnp.float32)) / messages,
            "filled": jnp.max(filled).astype(jnp.float32) / _FULL,
        }

    def _codes(self, call: Call) -> Callable[[int], "_Code"]:
        """Return a function of a number of workers to the code of their sums in a chunk."""
        layout = self.inner.layout(call)
        rows, block = layout.rows_per_chunk, layout.block

        def code(workers: int) -> _Code:
            width, deviation = self.inner.wire_bits(workers), self._deviation(workers)
            coded: IntegerCoder
            if self.coder == "rans":
                coded = RansCoder.of_normal(rows, block, deviation)
            else:
                coded = PatchedCoder.of_normal(rows, deviation, width)
            plain = PlainCoder(rows=rows, width=width)
            fine = min(coded, plain, key=lambda one: one.num_bytes)
            return _Code(fine, CoarseCoder.into(fine.num_bytes, rows, width))

        return code

    def _deviation(self, workers: int) -> float:
        """Return the standard deviation of the sum of the integers of some workers.

        Squared, it is that of what they have in common, that of the rest, and of the rounding.
        """
        step = self.inner.standard_deviations / self.inner.largest
        common, own = self.agreement * workers**2, (1 - self.agreement) * workers
        return math.sqrt(_CLAMPED * (common + own) / step**2 + workers / 6)


@dataclasses.dataclass(frozen=True)
class CostByTurn(WireCost):
    """Bytes of messages that differ by turn. `payload_bytes` are those of the last one."""

    saved_bytes: int = 0  # by which all messages of a worker are shorter than the last, in sum

    @override
    def bytes_scattered(self, payloads: int) -> int:
        return super().bytes_scattered(payloads) - self.saved_bytes

    @override
    def __add__(self, other: WireCost) -> WireCost:
        both = WireCost.__add__(self, other)
        saved = self.saved_bytes + (other.saved_bytes if isinstance(other, CostByTurn) else 0)
        return CostByTurn(both.payload_bytes, both.statistics_bytes, saved)

    __radd__ = __add__


class _Code(NamedTuple):
    """Code of the sums of a number of workers: the same bytes for both coders."""

    fine: IntegerCoder
    coarse: CoarseCoder  # of what does not fit

    @property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        return _HEADER_BYTES + self.fine.num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedChunks(ChunkCodec, Terms):
    """Codec whose hops decode integers, add them and encode the sum.

    A payload is uint8: whether the body is coarse, how full it is, the number of coarse messages
    that led to it as uint16, and the body.
    """

    summed: SummedChunks  # that has the integers, int16 [chunks, rows, 256], and decodes sums
    codes: Callable[[int], "_Code"]  # of the sums of so many workers
    largest: int  # integer of one worker
    num_workers: int  # in the last sum
    has_static_turns: bool  # else all messages have the size of the last sum's
    seed: Array  # uint32 [2] of the coarse rounding, the same on all workers

    @override
    def compress(self, chunk: Array, turn: Index) -> Payload:
        return self._encode(self._local(chunk), 1, chunk, turn, jnp.int32(0))

    @override
    def hop(self, payloads: Payload, chunk: Array, turn: Index) -> Payload:
        workers = self._workers_of(turn)
        received, coarse = self._decode(payloads, self._workers_of_each(len(payloads), workers))
        total = self._local(chunk) + jnp.sum(received, axis=0, dtype=jnp.int16)
        # A coarse message may be a little above the largest possible sum.
        most = np.int16(self.largest * workers)
        before = jnp.sum(coarse, dtype=jnp.int32)
        return self._encode(jnp.clip(total, -most, most), workers, chunk, turn, before)

    @override
    def accumulate(self, payloads: Payload, chunk: Array) -> Array:
        workers = self._workers_of_each(len(payloads), self.num_workers)
        received, _ = self._decode(payloads, workers)
        total = self._local(chunk) + jnp.sum(received, axis=0, dtype=jnp.int16)
        return self.summed.decode(total[None], chunk)

    @override
    def local_terms(self, chunk: Array) -> Array:
        return self._local(chunk).reshape(-1).astype(jnp.float32)

    @override
    def terms(self, payload: Payload, chunk: Array) -> Array:
        integers, _ = self._decode(payload[None], self._workers_of(0))
        return integers.reshape(-1).astype(jnp.float32)

    @override
    def values_of_terms(self, terms: Array, chunk: Array) -> Array:
        return self.summed.decode(terms.reshape(1, *self.summed.encoded.shape[1:]), chunk)

    @override
    def decompress(self, payloads: Payload) -> Array:
        sums, _ = self._decode(payloads, self.num_workers)
        return self.summed.decode(sums, None)[: self.summed.size]

    @override
    def rounded(self, turn: Index) -> "tuple[Array, CodedChunks]":
        values, summed = self.summed.rounded(turn)
        return values, dataclasses.replace(self, summed=summed)

    def _local(self, chunk: Array) -> Array:
        return take_chunk(self.summed.encoded, chunk - self.summed.first)

    def _workers_of(self, turn: Index) -> int:
        """Return the number of workers whose sums have the code of a hop."""
        return int(turn) + 1 if self.has_static_turns else self.num_workers

    def _workers_of_each(self, messages: int, workers: int) -> int:
        """Return the same of each of the messages that make a sum with the local values."""
        return (workers - 1) // messages if self.has_static_turns else self.num_workers

    def _encode(
        self, integers: Array, workers: int, chunk: Array, turn: Index, coarse_before: Array
    ) -> Array:
        code = self.codes(workers if self.has_static_turns else self.num_workers)
        encoded = code.fine.encode(integers)
        fits = encoded.filled <= 1
        coarse = code.coarse.encode(integers, self._noise(chunk, turn, code.fine.rows))
        coarse = jnp.pad(coarse, (0, code.fine.num_bytes - coarse.size))
        filled = jnp.clip(jnp.ceil(encoded.filled * _FULL), 0, 255).astype(jnp.uint8)
        count = (coarse_before + jnp.where(fits, 0, 1)).astype(jnp.uint16)
        header = [
            jnp.where(fits, np.uint8(0), np.uint8(1))[None],
            filled[None],
            lax.bitcast_convert_type(count, jnp.uint8),
        ]
        return jnp.concatenate([*header, jnp.where(fits, encoded.body, coarse)])

    def _noise(self, chunk: Array, turn: Index, rows: int) -> Array:
        """Return rounding offsets, float32 [rows, 256] in (0, 1)."""
        row_ids = jnp.asarray(chunk).astype(jnp.uint32) * np.uint32(rows)
        row_ids = row_ids + jnp.arange(rows, dtype=jnp.uint32)
        return jnp.asarray(offsets(row_ids, turn, self.seed, "independent"))

    def _decode(self, payloads: Array, workers: int) -> tuple[Array, Array]:
        """Return the integers of messages, int16 [messages, rows, 256], and their counts, int32."""
        code, bodies = self.codes(workers), payloads[:, _HEADER_BYTES:]
        fine, coarse = jax.vmap(code.fine.decode)(bodies), jax.vmap(code.coarse.decode)(bodies)
        integers = jnp.where((payloads[:, 0] == 0)[:, None, None], fine, coarse)
        counts = lax.bitcast_convert_type(payloads[:, 2:_HEADER_BYTES], jnp.uint16)
        return integers, counts.astype(jnp.int32)


def _has_static_turns(topology: Topology) -> bool:
    """Return whether the turn of each hop is an integer, one less than the workers in its sum.

    Messages of different turns may then have different sizes. In a loop, they have one.
    """
    return isinstance(topology, AllToAll) or (isinstance(topology, Ring) and topology.unroll)
