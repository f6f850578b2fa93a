"""What a method is: how numbers become bytes. It knows nothing of how the bytes travel."""

import abc
import dataclasses
from typing import Any

from jax import Array

from dynamiq_jax.chunks import ChunkCodec
from dynamiq_jax.topologies.base import Topology

State = Any  # pytree of arrays that a method carries between steps; () if none


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Static bytes of a method for one bucket."""

    payload_bytes: int  # one message: one chunk, one hop
    statistics_bytes: int  # sent by each worker before the first payload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """How numbers become bytes. Subclasses are frozen, keyword-only dataclasses, validated when
    made.
    """

    @abc.abstractmethod
    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """Bytes for a bucket of `size` coordinates over `num_workers` workers, in `num_chunks`
        chunks: a multiple of the workers that the topology names.
        """

    def init_state(self, size: int, num_workers: int) -> State:
        """State before the first step, for a bucket of `size` coordinates."""
        return ()

    @abc.abstractmethod
    def all_reduce(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> tuple[Array, State]:
        """Sum of a local bucket over the axis, and the next state.

        Args:
          flat: float [size].
          axis_name: axis to sum over.
          num_workers: size of the axis.
          topology: what carries payloads.
          key: typed PRNG key, the same on all workers.
          state: as from `init_state` or the step before.

        Returns:
          float32 [size], the same bits on all workers, and the state for the next step.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedMethod(Method):
    """A method that takes one round and no state: a codec of chunks, handed to the topology."""

    @abc.abstractmethod
    def bind(
        self, flat: Array, axis_name: str, num_workers: int, num_chunks: int, key: Array
    ) -> ChunkCodec:
        """Does the statistics pre-pass, if there is one, and returns the codec of this bucket.

        Args are those of `all_reduce` and `wire_cost`.
        """

    def all_reduce(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> tuple[Array, State]:
        """See `Method`."""
        codec = self.bind(flat, axis_name, num_workers, topology.num_chunks(num_workers), key)
        return topology.all_reduce(codec, axis_name, num_workers), state
