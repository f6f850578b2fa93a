"""What a method is: how numbers become bytes. It knows nothing of how the bytes travel."""

import abc
import dataclasses
from typing import Any, NamedTuple, NoReturn

from jax import Array, lax

from dynamiq_jax.chunks import ChunkCodec, WireCost
from dynamiq_jax.topologies.base import Gathered, Topology, gather

State = Any  # pytree of arrays that a method carries between steps; () if none


class Reduced(NamedTuple):
    """What an all-reduce of one bucket gives."""

    total: Array  # float32 [size], the same bits on all workers
    state: State  # for the next step
    arrived: Array  # a vector that is there once all has travelled, even if not decoded yet


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

    def for_leaves(self, shapes: tuple[tuple[int, ...], ...]) -> "Method":
        """The method for a bucket of leaves of these shapes, one after the other. Most do not care:
        a gradient is a vector to them.
        """
        return self

    @property
    def is_stateful(self) -> bool:
        """Whether the method carries state from step to step: it does if it has an `init_state` of
        its own.
        """
        return type(self).init_state is not Method.init_state

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
    ) -> Reduced:
        """Sum of a local bucket over the axis.

        Args:
          flat: float [size].
          axis_name: axis to sum over.
          num_workers: size of the axis.
          topology: what carries payloads.
          key: typed PRNG key, the same on all workers.
          state: as from `init_state` or the step before.
        """

    def all_reduce_applied(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> tuple[Reduced, Array]:
        """`all_reduce` of what the method can express of a local bucket; and that, float32 [size]:
        what it leaves out, error feedback keeps.
        """
        raise ValueError(
            f"method={self!r} cannot tell what it leaves out, which dq.methods.ErrorFeedback needs."
        )

    def reduce_scatter(
        self, flat: Array, axis_name: str, num_workers: int, *, topology: Topology, key: Array
    ) -> Array:
        """Sum over the axis of the worker's own part of a local bucket.

        Args are those of `all_reduce`; `flat` holds one part for each worker, of whole super-groups
        for each chunk.

        Returns:
          float32 [size / num_workers].
        """
        raise ValueError(
            f"method={self!r} cannot be used in dq.psum_scatter. Use dq.DynamiQ(), or dq.psum."
        )

    def all_gather(self, part: Array, axis_name: str, num_workers: int, *, key: Array) -> Gathered:
        """Parts of all workers, float [size] each and of whole super-groups. They decode to float32
        [num_workers * size], the same bits on all workers.
        """
        self._refuse_gather()

    def _refuse_gather(self) -> NoReturn:
        raise ValueError(
            f"method={self!r} cannot be used in dq.all_gather. Use dq.DynamiQ(), or "
            "jax.lax.all_gather."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedMethod(Method):
    """A method that takes one round and no state: a codec of chunks, handed to the topology."""

    @abc.abstractmethod
    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> ChunkCodec:
        """Does the statistics pre-pass, if there is one, and returns the codec of this bucket.

        Args beyond those of `all_reduce` and `wire_cost`:
          consecutive: chunk c has to hold the c-th part of the coordinates, as a reduce-scatter
            needs; otherwise a method may deal coordinates to chunks as it likes. The parts are of
            whole super-groups.
        """

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> ChunkCodec:
        """Codec of an all-gather, which knows the local chunk only: `part`, float [chunk size]."""
        self._refuse_gather()

    def all_reduce(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> Reduced:
        """See `Method`."""
        codec = self.bind(flat, axis_name, num_workers, topology.num_chunks(num_workers), key)
        gathered = topology.all_reduce(codec, axis_name, num_workers)
        return Reduced(gathered.decode(), state, gathered.arrived)

    def all_reduce_applied(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> tuple[Reduced, Array]:
        """See `Method`. What is applied goes through the codec once before it is sent; the rounding
        of partial sums on the way belongs to nobody and is not in it.
        """
        codec = self.bind(flat, axis_name, num_workers, topology.num_chunks(num_workers), key)
        # After all turns of the topology, whose rounding noise it must not repeat.
        turn = num_workers + lax.axis_index(axis_name)
        # The same codec again: another one would exchange its statistics once more.
        applied, codec = codec.once(turn, num_workers)
        gathered = topology.all_reduce(codec, axis_name, num_workers)
        return Reduced(gathered.decode(), state, gathered.arrived), applied

    def reduce_scatter(
        self, flat: Array, axis_name: str, num_workers: int, *, topology: Topology, key: Array
    ) -> Array:
        """See `Method`."""
        num_chunks = topology.num_chunks(num_workers)
        codec = self.bind(flat, axis_name, num_workers, num_chunks, key, consecutive=True)
        return topology.reduce_scatter(codec, axis_name, num_workers)

    def all_gather(self, part: Array, axis_name: str, num_workers: int, *, key: Array) -> Gathered:
        """See `Method`."""
        codec = self.bind_part(part, axis_name, num_workers, key)
        return gather(codec, (codec.compress(lax.axis_index(axis_name), 0),), axis_name)
