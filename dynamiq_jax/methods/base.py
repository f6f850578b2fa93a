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
        topology: Topology,
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
