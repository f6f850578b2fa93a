"""ARC-Top-K: the blocks whose sums over all workers are the largest (arXiv 2510.26709)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.methods import Axis
from dynamiq_jax.parts import check_integer, override
from dynamiq_research.topk_chunked import BudgetedBlocks
from pallas_kernels.codec import l2_norm
from pallas_kernels.codec.scales import bfloat16_bits, bfloat16_value

_BYTES = 2  # of a number of a sketch and of a score: bits of bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ARCTopK(BudgetedBlocks):
    """Top-k of blocks by the norm of their sum, which a random sketch estimates (ARC-Top-K).

    Paper: Chen, Ma, Li, He, Dong, Yuan, arXiv 2510.26709. Each worker multiplies its blocks by one
    random matrix of `rank` columns, the same on all workers and new in each step. These sketches
    are linear: their sum is the sketch of the sum of the blocks. Its norm is the score of a block.

    `TopKChunked` ranks a block by the norms that the workers have, added up as squares. Here,
    values of opposite signs on different workers cancel before the ranking. So ARC-Top-K wins with
    heterogeneous workers, where large blocks add up to little. Without such blocks, `TopKChunked`
    chooses better, since its norms are not estimates.

    Biased: use it inside `ErrorFeedback` or, with `inner=Exact()`, inside `EF21M`. The expected
    squared error is at most 1 - K / m of the squared norm of the sum, for K of m blocks, besides
    the error of `inner`.

    Each worker rounds its sketch to bfloat16. Noise that cancels therefore hides sums that are
    hundreds of times smaller than it.

    Differences from the paper and its release:
      - Blocks are `block_size` consecutive coordinates of a bucket, and not rows of a matrix.
      - Sketches are sent as bfloat16 to owners, which add them in float32. Scores are gathered, and
        not the sketch. `bits` counts both.
      - No warm-up: the release does not compress the first 1000 iterations. For that, compile the
        step with another method too, and call it first. Both carry the same state:

            first = dq.all_reduce_gradients("data", method=ErrorFeedback(inner=Exact()))
            later = dq.all_reduce_gradients("data", method=ErrorFeedback(inner=ARCTopK()))
    """

    rank: int = 4  # columns of the sketch: more choose better, and cost 8 bits a block each

    @override
    def __post_init__(self):
        check_integer("rank", self.rank, 1)
        super().__post_init__()

    @property
    @override
    def score_bits(self) -> int:
        return 8 * _BYTES * (self.rank + 1) // 2

    @override
    def scores_bytes(self, num_blocks: int, axis: Axis) -> int:
        share = -(-num_blocks // axis.size)
        return axis.owners_bytes(_BYTES * share * self.rank, _BYTES * share)

    @override
    def scores(self, blocks: Array, axis: Axis, key: Array) -> Array:
        """Estimate norms of sums over all workers, as bits of bfloat16.

        A sketch that leaves the range of float32 counts as not finite.
        """
        count, width = blocks.shape
        matrix = jax.random.normal(key, (width, self.rank), jnp.float32)
        # In float32: beside noise that cancels, the ten bits of a GPU's tensor cores are few.
        sketch = jnp.matmul(blocks.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST)
        words = jnp.pad(bfloat16_bits(sketch), ((0, -count % axis.size), (0, 0)))

        def combine(words: Array) -> Array:
            return bfloat16_bits(l2_norm(jnp.sum(bfloat16_value(words), axis=0), axis=1))

        shares = words.reshape(axis.size, -1, self.rank)
        return axis.reduce_by_owners(shares, combine).reshape(-1)[:count]
