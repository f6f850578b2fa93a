"""Block-sparse all-reduce: the union of the blocks that workers want (OmniReduce, SIGCOMM 2021)."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.codec import packing, scales
from dynamiq_jax.codec.norms import l2_norm
from dynamiq_jax.codec.ordering import rank
from dynamiq_jax.methods.base import State
from dynamiq_jax.methods.sparse_blocks import NOT_FINITE, SparseBlocks, check_share, share_of

_WISH_BITS = 2
_WANTED, _NOT_FINITE_WISH = np.uint16(1), np.uint16(2)  # wishes; 0 does without the block
_MOST, _NOT_FINITE_VOTES = 254, 255  # votes are bytes


class OmniReduceState(NamedTuple):
    """What did not fit: the same on all workers of the axis."""

    left_out: Array  # float32 scalar: share of the wanted blocks without room in the last step
    mean_left_out: Array  # float32 scalar: mean of these shares since the start
    steps: Array  # int32 scalar: steps since the start


@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniReduce(SparseBlocks):
    """Block-sparse all-reduce of Fei et al., "Efficient Sparse Collective Communication and its
    Application to Accelerate Distributed Deep Learning" (SIGCOMM 2021).

    Each worker wants its blocks that are not zero, or the `density` of all blocks that has the
    largest norms (compared in bfloat16). Blocks that any worker wants are summed, of all workers
    the values that they hold; others are zero. If `inner` is exact and the union fits into
    `capacity`, so is the sum of the union. Where it does not fit, the blocks that most workers want
    go first, then those with lower indices, and the state says what share was left out: make
    `capacity` larger if it stays above zero, or wrap the method in error feedback. Without
    `density`, dense gradients leave out the same blocks, the last ones, at every step.

    Differences from the paper: a capacity, since XLA wants static shapes; workers learn all wishes
    before they send, instead of streaming to an aggregator that asks for the next block; blocks
    travel on any topology. More than 254 wishes for a block count as 254.
    """

    density: float | None = 0.25  # share of blocks that a worker wants; None: all that are not zero
    capacity: float = 0.5  # share of blocks that are sent, wanted or not: half of the bytes of BF16

    def __post_init__(self):
        super().__post_init__()
        if self.density is not None:
            check_share("density", self.density)
        check_share("capacity", self.capacity)

    def init_state(self, size: int, num_workers: int) -> OmniReduceState:
        """See `Method`."""
        zero = jnp.zeros((), jnp.float32)
        return OmniReduceState(left_out=zero, mean_left_out=zero, steps=jnp.zeros((), jnp.int32))

    def num_chosen(self, size: int, num_workers: int, num_chunks: int) -> int:
        """See `SparseBlocks`."""
        return share_of(self.num_blocks(size), self.capacity)

    def scores_bytes(self, num_blocks: int, num_workers: int) -> int:
        """See `SparseBlocks`. Wishes to the owners of the votes, packed, and the votes to all."""
        share = -(-num_blocks // num_workers)
        return (num_workers - 1) * (_packed_rows(share) * packing.row_bytes(_WISH_BITS) + share)

    def scores(
        self, blocks: Array, room: int, axis_name: str, num_workers: int, state: State
    ) -> tuple[Array, State]:
        """See `SparseBlocks`. How many workers want a block."""
        votes = _count_votes(self._wishes(blocks), axis_name, num_workers)
        return votes, _next_state(state, votes, room)

    def _wishes(self, blocks: Array) -> Array:
        """What this worker wants of each block: uint16 [num_blocks]."""
        values = blocks.astype(jnp.float32)
        # As integers: float comparisons flush what is subnormal, and float maxima drop NaN.
        largest = jnp.max(lax.bitcast_convert_type(jnp.abs(values), jnp.int32), axis=1)
        wanted = largest > 0
        if self.density is not None:
            best = rank(scales.bfloat16_bits(l2_norm(values, axis=1)))
            best = best[: share_of(blocks.shape[0], self.density)]
            wanted &= jnp.zeros_like(wanted).at[best].set(True, unique_indices=True)
        infinity = np.float32(np.inf).view(np.int32)
        return jnp.where(largest >= infinity, _NOT_FINITE_WISH, wanted.astype(jnp.uint16))


def _packed_rows(share: int) -> int:
    """Rows of the packing that hold the wishes for a worker's share of the blocks."""
    return -(-share // packing.SUPER_GROUP_SIZE)


def _count_votes(wishes: Array, axis_name: str, num_workers: int) -> Array:
    """Wishes of this worker to how many want each block, uint16 [num_blocks]; NOT_FINITE for a
    block that is not finite.

    Counted by owners and gathered: two bits and a byte for each block, however many workers.
    """
    share = -(-wishes.size // num_workers)
    rows = _packed_rows(share)
    mine = jnp.pad(wishes, (0, num_workers * share - wishes.size)).reshape(num_workers, share)
    mine = jnp.pad(mine, ((0, 0), (0, rows * packing.SUPER_GROUP_SIZE - share)))
    (packed,) = packing.pack(mine.reshape(-1, packing.SUPER_GROUP_SIZE), _WISH_BITS)
    received = lax.all_to_all(
        packed.reshape(num_workers, -1), axis_name, split_axis=0, concat_axis=0
    )
    planes = (received.reshape(num_workers * rows, -1),)
    wanted = packing.unpack(planes, num_workers * rows, _WISH_BITS)
    wanted = wanted.reshape(num_workers, -1)[:, :share]
    count = jnp.sum(wanted > 0, axis=0, dtype=jnp.int32)
    infinite = jnp.any(wanted == _NOT_FINITE_WISH, axis=0)
    votes = jnp.where(infinite, _NOT_FINITE_VOTES, jnp.minimum(count, _MOST)).astype(jnp.uint8)
    gathered = compat.all_gather(votes, axis_name).reshape(-1)[: wishes.size].astype(jnp.uint16)
    return jnp.where(gathered == _NOT_FINITE_VOTES, NOT_FINITE, gathered)


def _next_state(state: OmniReduceState, votes: Array, room: int) -> OmniReduceState:
    wanted = jnp.sum(votes > 0, dtype=jnp.int32)
    over = jnp.maximum(wanted - room, 0).astype(jnp.float32)
    left_out = over / jnp.maximum(wanted, 1).astype(jnp.float32)
    steps = state.steps + 1
    mean = state.mean_left_out
    return OmniReduceState(
        left_out=compat.match_varying(left_out, mean),
        mean_left_out=mean + (left_out - mean) / steps.astype(jnp.float32),
        steps=steps,
    )
