"""What a method is: how numbers become bytes. It knows nothing of how the bytes travel.

Two families, one interface. A topology moves opaque payloads and asks a `ChunkCodec` for three
things: the first payload of a chunk, the payload after one more worker has been added, and the
values of the final payloads. Methods that decode and re-encode at each hop do so in `hop`; for
methods whose encoded form can be summed directly `hop` is a sum of payloads (`SummedChunks`).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax import Array

if TYPE_CHECKING:
    from dynamiq_jax.topologies.base import Topology

Payload = Any  # pytree of arrays: what one chunk puts on the wire in one hop
State = Any  # pytree of arrays that a method carries between steps; () if none


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Static bytes of a method for one bucket."""

    payload_bytes: int  # one message: one chunk, one hop
    statistics_bytes: int  # sent by each worker before the first payload


class ChunkCodec(Protocol):
    """One bucket of one all-reduce on one worker: `num_chunks` chunks, one for each worker."""

    def compress(self, chunk: Array, hop: Array | int) -> Payload:
        """Payload of the local values of a chunk."""

    def hop(self, payload: Payload, chunk: Array, hop: Array | int) -> Payload:
        """Payload of the received partial sum of a chunk plus the local values."""

    def decompress(self, payloads: Payload) -> Array:
        """Payloads of all chunks, stacked on a leading axis, to the sum: float32 [size]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """How numbers become bytes. Subclasses are frozen, keyword-only dataclasses, validated when
    made.
    """

    @abc.abstractmethod
    def wire_cost(self, size: int, num_workers: int) -> WireCost:
        """Bytes for a bucket of `size` coordinates over `num_workers` workers."""

    @abc.abstractmethod
    def bind(self, flat: Array, axis_name: str, num_workers: int, key: Array) -> ChunkCodec:
        """Does the method's statistics pre-pass, if it has one, and returns the codec of this
        bucket.

        Args:
          flat: local bucket, float [size].
          axis_name: axis to sum over, for the pre-pass.
          num_workers: size of the axis.
          key: typed PRNG key, the same on all workers.
        """

    def init_state(self, size: int, num_workers: int) -> State:
        """State before the first step, for a bucket of `size` coordinates."""
        return ()

    def all_reduce(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: "Topology",
        key: Array,
        state: State,
    ) -> tuple[Array, State]:
        """Sum of `flat` [size] over the axis as float32 [size], the same bits on all workers, and
        the next state.

        Methods that take several rounds or carry state override this.
        """
        return topology.all_reduce(
            self.bind(flat, axis_name, num_workers, key), axis_name, num_workers
        ), state


@dataclasses.dataclass(frozen=True)
class SummedChunks:
    """Codec of methods whose encoded form can be summed: a hop adds the local payload to the
    received one.

    `encoded` is a pytree of arrays whose leading axis counts chunks; `decode` maps the summed tree
    of all chunks to float32 [size].
    """

    encoded: Payload
    decode: Callable[[Payload], Array]

    def compress(self, chunk: Array, hop: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return jax.tree.map(lambda leaf: leaf[chunk], self.encoded)

    def hop(self, payload: Payload, chunk: Array, hop: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return jax.tree.map(lambda received, leaf: received + leaf[chunk], payload, self.encoded)

    def decompress(self, payloads: Payload) -> Array:
        """See `ChunkCodec`."""
        return self.decode(payloads)
