"""Chunk-wise top-k: the blocks whose norms over all workers are the largest (arXiv 2407.01378)."""

import bisect
import dataclasses
import numbers

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec import scales
from dynamiq_jax.codec.norms import l2_norm
from dynamiq_jax.methods.base import State
from dynamiq_jax.methods.sparse_blocks import SparseBlocks
from dynamiq_jax.methods.statistics import combine_statistics, combined_bytes

_STATISTICS_BITS = 16  # of a block
_MAX_BITS = 32.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKChunked(SparseBlocks):
    """TopKC of "Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of
    Gradient Compression" (arXiv 2407.01378): top-k that can be all-reduced. Workers agree on the
    norms of blocks (the paper's chunks), and all sum the same ones.

    Biased: a block that never has a large norm is never summed. Use it inside error feedback, which
    adds what was left out to the next gradient. Norms are compared in bfloat16. Differences from
    the paper: norms travel as bfloat16, are reduced by owners and gathered, so that all workers
    choose alike bit for bit; `bits` counts them.

    >>> TopKChunked(bits=0.5).num_chosen(2**20, 8, 8), 2**20 // 256
    (112, 4096)
    """

    bits: float = 2.0  # per coordinate of the bucket, norms included: with BF16, 1/8 of the blocks

    def __post_init__(self):
        super().__post_init__()
        low = _STATISTICS_BITS / self.block_size
        is_number = isinstance(self.bits, numbers.Real) and type(self.bits) is not bool
        if not (is_number and low < self.bits <= _MAX_BITS):
            raise ValueError(
                f"bits={self.bits!r} is out of range. Give more than {low:g}, which the norms of "
                f"blocks of {self.block_size} take, and at most {_MAX_BITS:g}."
            )

    def num_chosen(self, size: int, num_workers: int, num_chunks: int) -> int:
        """See `SparseBlocks`. As many as keep the promise of `bits`."""

        def sent(room: int) -> int:
            cost = self._cost_of(room, size, num_workers, num_chunks)
            payloads = 2 * (num_workers - 1) * num_chunks // num_workers
            return payloads * cost.payload_bytes + cost.statistics_bytes

        promised = self.bits / 8 * size * 2 * (num_workers - 1) / num_workers
        rooms = range(1, self.num_blocks(size) + 1)
        return max(1, bisect.bisect_right(rooms, promised, key=sent))

    def scores_bytes(self, num_blocks: int, num_workers: int) -> int:
        """See `SparseBlocks`."""
        return combined_bytes(num_blocks + -num_blocks % num_workers, num_workers)

    def scores(
        self, blocks: Array, room: int, axis_name: str, num_workers: int, state: State
    ) -> tuple[Array, State]:
        """See `SparseBlocks`. Norms over all workers, as bfloat16 bits; one that leaves the range
        of float32 counts as not finite.
        """
        num_blocks = blocks.shape[0]
        norms = jnp.pad(l2_norm(blocks.astype(jnp.float32), axis=1), (0, -num_blocks % num_workers))
        combined = combine_statistics(norms[None], axis_name, num_workers)
        return scales.bfloat16_bits(combined[0, :num_blocks]), state
