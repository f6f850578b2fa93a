"""Chunk-wise top-k: the blocks whose norms over all workers are the largest (arXiv 2407.01378)."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.methods import Axis
from dynamiq_jax.parts import override
from dynamiq_research.topk_chunked.budget import BudgetedBlocks
from pallas_kernels.codec import l2_norm
from pallas_kernels.codec.scales import bfloat16_bits, bfloat16_value

_BYTES = 2  # of a norm: bits of bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKChunked(BudgetedBlocks):
    """Top-k of blocks that can be all-reduced, TopKC (arXiv 2407.01378).

    Paper: "Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of Gradient
    Compression". Workers agree on the norms of blocks (the paper's chunks), and all sum the same
    ones.

    Biased: a block that never has a large norm is never summed. Use the method inside error
    feedback, which adds the blocks that were left out to the next gradient. Norms are compared in
    bfloat16. Differences from the paper: norms are sent as bfloat16, reduced by owners and
    gathered, so that all workers choose the same blocks; `bits` counts the norms.
    """

    score_bits = 8 * _BYTES

    @override
    def scores_bytes(self, num_blocks: int, axis: Axis) -> int:
        share = _BYTES * -(-num_blocks // axis.size)
        return axis.owners_bytes(share, share)

    @override
    def scores(self, blocks: Array, axis: Axis, key: Array) -> Array:
        """Compute norms over all workers, as bits of bfloat16.

        A norm that leaves the range of float32 counts as not finite.
        """
        count = blocks.shape[0]
        words = bfloat16_bits(l2_norm(blocks.astype(jnp.float32), axis=1))

        def combine(words: Array) -> Array:
            return bfloat16_bits(l2_norm(bfloat16_value(words), axis=0))

        shares = jnp.pad(words, (0, -count % axis.size)).reshape(axis.size, -1)
        return axis.reduce_by_owners(shares, combine).reshape(-1)[:count]
