"""Top-K: the largest coordinates of each worker, which are gathered with their indices."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.methods import Call, Method, Reduced, State, WireCost
from dynamiq_jax.parts import check_choice, match_varying, override, take_chunk
from dynamiq_research.single_coordinates.largest import largest
from dynamiq_research.topk_chunked import check_bits

_INDEX_BYTES = 4
_VALUE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Method):
    """The K largest magnitudes of each worker, with their indices, and zeros elsewhere.

    Papers: Aji, Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
    arXiv 1704.05021; Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, arXiv
    1712.01887. Each worker chooses for itself. All gather the messages of all, and add up what is
    in them, in float32 and in the order of the workers.

    A message has 4 bytes for an index and 2 or 4 for a value. Each worker sends its own to all
    others: bytes grow with the number of workers, where those of an all-reduce stay. Under a budget
    of `bits`, K falls as one over that number: K = bits * size / (4 * bytes * workers). A gather
    takes the same route with any `topology`.

    Biased: use it inside `ErrorFeedback`, as the papers do, or inside `EF21M`, since sums lose
    nothing of what workers applied. NaN and Inf come first, and surface at their coordinates. Of
    more than K on one worker, only K do.

    Differences from the papers: K is a budget, and not 0.1% or 1% of the coordinates; the largest
    are found exactly, not in a sample; a bucket can hold several leaves. Momentum correction,
    clipping of each worker's gradient and warm-up of the second paper are not here.

    >>> TopK(bits=1.0, values="float32").bits
    1.0
    """

    bits: float = 2.0  # per coordinate of the bucket, indices included
    values: Literal["bfloat16", "float32"] = "bfloat16"  # type of values on the wire

    def __post_init__(self):
        check_bits(self.bits, 0)
        check_choice("values", self.values, tuple(_VALUE_BYTES))

    def num_chosen(self, call: Call) -> int:
        """Return K, the coordinates of each worker for which `bits` pay, at least one. Static."""
        paid = self.bits * call.size / (4 * self._entry_bytes * call.num_workers)
        return min(max(1, int(paid)), call.size)

    @override
    def wire_cost(self, call: Call) -> WireCost:
        # Everything is sent at once: there are no chunks that travel by the topology.
        message = self._entry_bytes * self.num_chosen(call)
        return WireCost(0, statistics_bytes=(call.num_workers - 1) * message)

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        message = self._encode(flat.astype(jnp.float32), self.num_chosen(call))
        gathered = call.axis.gather(message)

        # One worker after the other: in one scatter, equal indices are added in an order that
        # depends on the backend, and replicas would differ.
        def add(worker: Array, total: Array) -> Array:
            return _put(total, self._decode(take_chunk(gathered, worker)))

        zeros = jnp.zeros(call.size, jnp.float32)
        total = lax.fori_loop(0, call.num_workers, add, match_varying(zeros, gathered))
        applied = _put(zeros, self._decode(message)) if call.feedback else None
        token = gathered.reshape(-1)[:1].astype(jnp.float32)
        return Reduced(total, token=token, applied=applied)

    @property
    def _entry_bytes(self) -> int:
        return _INDEX_BYTES + _VALUE_BYTES[self.values]

    def _encode(self, values: Array, count: int) -> Array:
        """Return the message of a worker, uint16 [count, 3 or 4]: an index and a value in a row."""
        # Compared as integers, whose order is the same and has NaN on top.
        places = largest(lax.bitcast_convert_type(jnp.abs(values), jnp.uint32), count)
        chosen = values.at[places].get(unique_indices=True, indices_are_sorted=True)
        words = lax.bitcast_convert_type(chosen.astype(self.values), jnp.uint16)
        return jnp.concatenate(
            [lax.bitcast_convert_type(places, jnp.uint16), words.reshape(count, -1)], axis=1
        )

    def _decode(self, message: Array) -> tuple[Array, Array]:
        """Return the indices, int32 [count], and the values, float32 [count], of a message."""
        places, words = message[:, :2], message[:, 2:]
        words = words[:, 0] if words.shape[1] == 1 else words
        chosen = lax.bitcast_convert_type(words, jnp.dtype(self.values))
        return lax.bitcast_convert_type(places, jnp.int32), chosen.astype(jnp.float32)


def _put(total: Array, entries: tuple[Array, Array]) -> Array:
    """Add the entries of one message to float32 [size]."""
    places, values = entries
    return total.at[places].add(values, unique_indices=True, indices_are_sorted=True)
