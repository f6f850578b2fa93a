"""Block-sparse all-reduce of the union of requested blocks (OmniReduce, SIGCOMM 2021)."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.parts import check_number, override
from dynamiq_research.topk_chunked import NOT_FINITE, SparseBlocks
from pallas_kernels.codec import l2_norm, packing, rank, scales

_REQUEST_BITS = 2
_REQUEST_NOT_FINITE = np.uint16(2)  # 0: not requested, 1: requested
_MOST, _COUNT_NOT_FINITE = 254, 255  # counts are bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniReduce(SparseBlocks):
    """Block-sparse all-reduce: the sum of the blocks that any worker requests.

    Paper: Fei et al., "Efficient Sparse Collective Communication and its Application to Accelerate
    Distributed Deep Learning" (SIGCOMM 2021).

    Each worker requests its blocks that are not zero, or the `density` of all blocks that has the
    largest norms (compared in bfloat16). Blocks that any worker requests are summed, with the
    values of all workers; others are zero. If `inner` is exact and the union fits into `capacity`,
    the sum of the union is exact. If the union does not fit, the blocks that most workers request
    go first, then those with lower indices. The metric `left_out` is the share of requested blocks
    without room: make `capacity` larger if it stays above zero, or wrap the method in error
    feedback. Without `density`, dense gradients leave out the same blocks, the last ones, at every
    step.

    Differences from the paper: a capacity, since XLA requires static shapes; all requests are
    exchanged before blocks are sent, instead of an aggregator that streams them; any topology
    carries the blocks. More than 254 requests for a block count as 254.
    """

    density: float | None = 0.25  # share of blocks that a worker requests; None: nonzero blocks
    capacity: float = 0.5  # share of blocks that are sent, requested or not: half of BF16

    @override
    def __post_init__(self):
        super().__post_init__()
        if self.density is not None:
            _check_share("density", self.density)
        _check_share("capacity", self.capacity)

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return ("left_out",)

    @override
    def num_chosen(self, call: Call) -> int:
        return _share_of(self.num_blocks(call.size), self.capacity)

    @override
    def scores_bytes(self, num_blocks: int, axis: Axis) -> int:
        # Packed requests to the owners of the counts, and the counts to all.
        share = -(-num_blocks // axis.size)
        return axis.owners_bytes(_packed_rows(share) * packing.row_bytes(_REQUEST_BITS), share)

    @override
    def scores(self, blocks: Array, axis: Axis, key: Array) -> Array:
        """Count the workers that request each block."""
        requests = self._requests(blocks)
        share = -(-requests.size // axis.size)
        rows = _packed_rows(share)
        mine = jnp.pad(requests, (0, axis.size * share - requests.size)).reshape(axis.size, share)
        mine = jnp.pad(mine, ((0, 0), (0, rows * packing.SUPER_GROUP_SIZE - share)))
        (packed,) = packing.pack(mine.reshape(-1, packing.SUPER_GROUP_SIZE), _REQUEST_BITS)

        def count(packed: Array) -> Array:
            requested = jax.vmap(lambda one: packing.unpack(one, rows, _REQUEST_BITS))(packed)
            requested = requested.reshape(axis.size, -1)[:, :share]
            counts = jnp.minimum(jnp.sum(requested > 0, axis=0, dtype=jnp.int32), _MOST)
            infinite = jnp.any(requested == _REQUEST_NOT_FINITE, axis=0)
            return jnp.where(infinite, _COUNT_NOT_FINITE, counts).astype(jnp.uint8)

        counts = axis.reduce_by_owners(packed.reshape(axis.size, -1), count)
        counts = counts.reshape(-1)[: requests.size].astype(jnp.uint16)
        return jnp.where(counts == _COUNT_NOT_FINITE, NOT_FINITE, counts)

    @override
    def measure(self, scores: Array, room: int) -> Mapping[str, Array]:
        requested = jnp.sum(scores > 0, dtype=jnp.int32)
        over = jnp.maximum(requested - room, 0).astype(jnp.float32)
        return {"left_out": over / jnp.maximum(requested, 1).astype(jnp.float32)}

    def _requests(self, blocks: Array) -> Array:
        """Compute the requests of this worker: uint16 [num_blocks]."""
        values = blocks.astype(jnp.float32)
        # As integers: float comparisons flush subnormals, and float maxima drop NaN.
        largest = jnp.max(lax.bitcast_convert_type(jnp.abs(values), jnp.int32), axis=1)
        requested = largest > 0
        if self.density is not None:
            best, _ = rank(scales.bfloat16_bits(l2_norm(values, axis=1)))
            best = best[: _share_of(blocks.shape[0], self.density)]
            requested &= jnp.zeros_like(requested).at[best].set(True, unique_indices=True)
        infinity = np.float32(np.inf).view(np.int32)
        return jnp.where(largest >= infinity, _REQUEST_NOT_FINITE, requested.astype(jnp.uint16))


def _packed_rows(share: int) -> int:
    """Return the rows of the packing that hold the requests for one owner's share."""
    return -(-share // packing.SUPER_GROUP_SIZE)


def _check_share(name: str, share: float) -> None:
    check_number(name, share, math.ulp(0.0), 1.0, "a share of the blocks, above 0 and up to 1")


def _share_of(num_blocks: int, share: float) -> int:
    """Convert a share of all blocks to a number of them, at least one."""
    return max(1, round(share * num_blocks))
