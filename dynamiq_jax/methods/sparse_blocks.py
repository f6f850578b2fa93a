"""Sums of some blocks of a bucket: the best become one dense vector, which another method sums.

All workers choose the same blocks, so nothing says on the wire which they are, and any topology
carries them.
"""

import abc
import dataclasses
import numbers

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.chunks import WireCost
from dynamiq_jax.codec.ordering import rank
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.methods.base import ChunkedMethod, Method, Reduced, State
from dynamiq_jax.methods.bf16 import BF16
from dynamiq_jax.topologies.base import Topology

NOT_FINITE = np.uint16(0x7F80)  # scores from here on: blocks that hold NaN or Inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseBlocks(Method):
    """A method that sums as many blocks as it has bytes for and leaves the others at zero.

    Blocks are scored, the same on all workers, and the highest scores are summed, of equal ones the
    first; a block of score 0 never is. Blocks that are not finite come first; those that there is
    no room for are NaN in the sum without being sent.
    """

    # Sums the chosen blocks, as one dense vector: what each of their coordinates costs.
    inner: ChunkedMethod = dataclasses.field(default_factory=BF16)
    block_size: int = SUPER_GROUP_SIZE  # coordinates sent together; fewer choose better, cost bytes

    def __post_init__(self):
        if not isinstance(self.inner, ChunkedMethod):
            raise ValueError(
                f"inner={self.inner!r} cannot sum blocks: it is no method of one round without "
                "state. Give one, such as dq.BF16() or dq.Exact()."
            )
        if not (isinstance(self.block_size, numbers.Integral) and self.block_size > 0):
            raise ValueError(
                f"block_size={self.block_size!r} is not a number of coordinates. Give a positive "
                f"integer, such as {SUPER_GROUP_SIZE}."
            )

    @abc.abstractmethod
    def num_chosen(self, size: int, num_workers: int, num_chunks: int) -> int:
        """Blocks that there is room for, at least one; see `wire_cost`. Static."""

    @abc.abstractmethod
    def scores_bytes(self, num_blocks: int, num_workers: int) -> int:
        """Bytes that each worker sends for the scores."""

    @abc.abstractmethod
    def scores(
        self, blocks: Array, room: int, axis_name: str, num_workers: int, state: State
    ) -> tuple[Array, State]:
        """Scores of blocks, float [num_blocks, block_size], of which `room` are going to be summed.

        Returns:
          uint16 [num_blocks] below 2^15, the same on all workers, from NOT_FINITE on where any of
          them holds NaN or Inf; and the next state.
        """

    def num_blocks(self, size: int) -> int:
        """Blocks of a bucket of `size` coordinates; the last one may be padded."""
        return -(-size // self.block_size)

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`."""
        room = self.num_chosen(size, num_workers, num_chunks)
        return self._cost_of(room, size, num_workers, num_chunks)

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
        chosen, state = self._choose(flat, axis_name, num_workers, topology, state)
        inner = self.inner.all_reduce(
            chosen.values, axis_name, num_workers, topology=topology, key=key, state=()
        )
        total = chosen.put_back(inner.total, chosen.not_finite())
        return Reduced(total, state, inner.arrived)

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
        """See `Method`. A worker applies what `inner` makes of its values of the chosen blocks."""
        chosen, state = self._choose(flat, axis_name, num_workers, topology, state)
        inner, applied = self.inner.all_reduce_applied(
            chosen.values, axis_name, num_workers, topology=topology, key=key, state=()
        )
        total = chosen.put_back(inner.total, chosen.not_finite())
        nothing = jnp.zeros(chosen.scores.shape, jnp.float32)
        return Reduced(total, state, inner.arrived), chosen.put_back(applied, nothing)

    def _cost_of(self, room: int, size: int, num_workers: int, num_chunks: int) -> WireCost:
        cost = self.inner.wire_cost(room * self.block_size, num_workers, num_chunks)
        scores_bytes = self.scores_bytes(self.num_blocks(size), num_workers)
        return WireCost(
            payload_bytes=cost.payload_bytes, statistics_bytes=cost.statistics_bytes + scores_bytes
        )

    def _choose(
        self, flat: Array, axis_name: str, num_workers: int, topology: Topology, state: State
    ) -> "tuple[_Chosen, State]":
        room = self.num_chosen(flat.size, num_workers, topology.num_chunks(num_workers))
        blocks = jnp.pad(flat, (0, -flat.size % self.block_size)).reshape(-1, self.block_size)
        scores, state = self.scores(blocks, room, axis_name, num_workers, state)
        places = rank(scores)[:room]
        best = blocks.at[places].get(unique_indices=True, mode="promise_in_bounds")
        wanted = scores.at[places].get(unique_indices=True, mode="promise_in_bounds") > 0
        values = jnp.where(wanted[:, None], best, jnp.zeros((), best.dtype)).reshape(-1)
        return _Chosen(values=values, places=places, scores=scores, size=flat.size), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The chosen blocks of one worker."""

    values: Array  # float [room * block_size], dense; zeros where nothing is left to choose
    places: Array  # int32 [room], of which blocks
    scores: Array  # uint16 [num_blocks]
    size: int  # coordinates of the bucket, before padding

    def not_finite(self) -> Array:
        """NaN for blocks that are not finite, else 0: float32 [num_blocks]."""
        return jnp.where(self.scores >= NOT_FINITE, np.float32(np.nan), np.float32(0))

    def put_back(self, values: Array, others: Array) -> Array:
        """Values of the chosen blocks at their places, float32 [size], and all coordinates of any
        other block as `others`, float32 [num_blocks], says.
        """
        rows = values.reshape(self.places.size, -1)
        blocks = jnp.broadcast_to(others[:, None], (others.size, rows.shape[1]))
        blocks = blocks.at[self.places].set(rows, unique_indices=True, mode="promise_in_bounds")
        return blocks.reshape(-1)[: self.size]


def share_of(num_blocks: int, share: float) -> int:
    """A share of all blocks as a number of them, at least one."""
    return max(1, round(share * num_blocks))


def check_share(name: str, share: float) -> None:
    """Raises ValueError for a field that is not a share of the blocks."""
    if not (isinstance(share, numbers.Real) and 0 < share <= 1):
        raise ValueError(
            f"{name}={share!r} is not a share of the blocks. Give a number above 0, up to 1."
        )
