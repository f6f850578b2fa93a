"""Base of methods that sum some blocks of a bucket.

The best blocks become one dense vector, which an inner method sums. All workers choose the same
blocks, so no indices are sent, and any topology carries the values.
"""

import abc
import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.methods import BF16, Axis, Call, ChunkedMethod, Method, Reduced, State, WireCost
from dynamiq_jax.parts import as_chunks, check_integer, override
from pallas_kernels.codec import SUPER_GROUP_SIZE, rank

NOT_FINITE = np.uint16(0x7F80)  # scores from here on: blocks that hold NaN or Inf
_SCORES = 0x73636F72  # folded into the key of scores


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some of the blocks of a bucket."""

    places: Array  # int32 [room]

    @staticmethod
    def best(scores: Array, room: int) -> "Chosen":
        """Choose the blocks with the highest scores, uint16 [blocks] below 2^15."""
        return Chosen(rank(scores)[0][:room])

    def take(self, blocks: Array) -> Array:
        """Return the chosen ones of [blocks, ...]: [room, ...]."""
        return blocks.at[self.places].get(unique_indices=True, mode="promise_in_bounds")

    def put(self, chosen: Array, blocks: Array) -> Array:
        """Replace the chosen ones of [blocks, ...] by [room, ...]."""
        return blocks.at[self.places].set(chosen, unique_indices=True, mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseBlocks(Method):
    """A method that sums as many blocks as it has bytes for and leaves the others at zero.

    Each block gets a score, the same on all workers. The blocks with the highest scores are summed.
    Of equal scores, the first block is chosen. A block of score 0 is never summed. Blocks that are
    not finite come first. If there is no room for them, they are NaN in the sum without being sent.
    """

    # Sums the chosen blocks, as one dense vector. Its bits are the cost of each coordinate.
    inner: ChunkedMethod = dataclasses.field(default_factory=BF16)
    block_size: int = SUPER_GROUP_SIZE  # coordinates sent together; fewer choose better, cost bytes

    def __post_init__(self):
        if not isinstance(self.inner, ChunkedMethod):
            raise ValueError(
                f"inner={self.inner!r} cannot sum blocks: it is not a method of one round without "
                "state. Give one, such as dq.methods.BF16() or dq.methods.Exact()."
            )
        check_integer("block_size", self.block_size, 1)

    @abc.abstractmethod
    def num_chosen(self, call: Call) -> int:
        """Return the number of blocks that there is room for, at least one. Static."""

    @abc.abstractmethod
    def scores_bytes(self, num_blocks: int, axis: Axis) -> int:
        """Return the bytes that each worker sends for the scores."""

    @abc.abstractmethod
    def scores(self, blocks: Array, axis: Axis, key: Array) -> Array:
        """Score blocks, float [num_blocks, block_size].

        The key is the same on all workers, and differs from the key of the rounding noise.

        Returns:
          uint16 [num_blocks] below 2^15, the same on all workers; NOT_FINITE or more for blocks in
          which any worker has NaN or Inf.
        """

    def measure(self, scores: Array, room: int) -> Mapping[str, Array]:
        """Return the metrics of a step from the scores, of which `room` are summed."""
        return {}

    def num_blocks(self, size: int) -> int:
        """Return the number of blocks of `size` coordinates; the last may be padded."""
        return -(-size // self.block_size)

    def cost_of(self, room: int, call: Call) -> WireCost:
        """Return the bytes of a bucket of which `room` blocks are summed."""
        scores = WireCost(0, self.scores_bytes(self.num_blocks(call.size), call.axis))
        return self.inner.wire_cost(call.of_size(room * self.block_size)) + scores

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return self.cost_of(self.num_chosen(call), call)

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        room = self.num_chosen(call)
        blocks = as_chunks(flat, 1, self.block_size).reshape(-1, self.block_size)
        scores = self.scores(blocks, call.axis, jax.random.fold_in(key, _SCORES))
        chosen = Chosen.best(scores, room)
        wanted = chosen.take(scores) > 0
        best = chosen.take(blocks)
        values = jnp.where(wanted[:, None], best, jnp.zeros((), best.dtype)).reshape(-1)

        def put_back(values: Array, others: Array) -> Array:
            """Place the values of the chosen blocks, and fill every other block by its `others`."""
            others = jnp.broadcast_to(others[:, None], blocks.shape)
            return chosen.put(values.reshape(room, -1), others).reshape(-1)[: call.size]

        reduced = self.inner.all_reduce(values, call.of_size(values.size), key, ())
        not_finite = jnp.where(scores >= NOT_FINITE, np.float32(np.nan), np.float32(0))
        applied = reduced.applied
        if applied is not None:
            applied = put_back(applied, jnp.zeros(scores.shape, jnp.float32))
        return dataclasses.replace(
            reduced,
            total=put_back(reduced.total, not_finite),
            applied=applied,
            metrics=self.measure(scores, room),
        )
