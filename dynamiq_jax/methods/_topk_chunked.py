"""Chunk-wise top-k: the blocks whose norms over all workers are the largest (arXiv 2407.01378)."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from dynamiq_jax._core import Axis
from dynamiq_jax.methods import _norms as norms
from dynamiq_jax.methods._budget import BudgetedBlocks
from pallas_kernels._jax.compat import override
from pallas_kernels.codec import l2_norm


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

    score_bits = 16

    @override
    def scores_bytes(self, num_blocks: int, axis: Axis) -> int:
        return norms.combined_bytes(num_blocks + -num_blocks % axis.size, axis)

    @override
    def scores(self, blocks: Array, axis: Axis, key: Array) -> Array:
        """Compute norms over all workers, as bits of bfloat16.

        A norm that leaves the range of float32 counts as not finite.
        """
        count = blocks.shape[0]
        local = l2_norm(blocks.astype(jnp.float32), axis=1)
        return norms.combine_norms(jnp.pad(local, (0, -count % axis.size)), axis)[:count]
