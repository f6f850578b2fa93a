"""Chunk-wise top-k: the blocks whose norms over all workers are the largest (arXiv 2407.01378)."""

import bisect
import dataclasses
import numbers

import jax.numpy as jnp
from jax import Array

from dynamiq_jax._core import Axis
from dynamiq_jax.methods import _norms as norms
from dynamiq_jax.methods._base import Call
from dynamiq_jax.methods._sparse_blocks import SparseBlocks
from pallas_kernels.codec import l2_norm
from pallas_kernels.compat import override

_STATISTICS_BITS = 16  # of a block
_MAX_BITS = 32.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKChunked(SparseBlocks):
    """Top-k of blocks that can be all-reduced, TopKC (arXiv 2407.01378).

    Paper: "Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of Gradient
    Compression". Workers agree on the norms of blocks (the paper's chunks), and all sum the same
    ones.

    Biased: a block that never has a large norm is never summed. Use it inside error feedback, which
    adds what was left out to the next gradient. Norms are compared in bfloat16. Differences from
    the paper: norms are sent as bfloat16, reduced by owners and gathered, so that all workers
    choose the same blocks; `bits` counts them.
    """

    bits: float = 2.0  # per coordinate of the bucket, norms included: with BF16, 1/8 of the blocks

    @override
    def __post_init__(self):
        super().__post_init__()
        low = _STATISTICS_BITS / self.block_size
        is_number = isinstance(self.bits, numbers.Real) and type(self.bits) is not bool
        if not (is_number and low < self.bits <= _MAX_BITS):
            raise ValueError(
                f"bits={self.bits!r} is out of range. Give more than {low:g}, which the norms of "
                f"blocks of {self.block_size} take, and at most {_MAX_BITS:g}."
            )

    @override
    def num_chosen(self, call: Call) -> int:
        """Return the most blocks that keep the wire within `bits`."""

        def sent(room: int) -> int:
            return call.topology.bytes_sent(self.cost_of(room, call), call.num_workers)

        allowed = self.bits / 8 * call.size * 2 * (call.num_workers - 1) / call.num_workers
        rooms = range(1, self.num_blocks(call.size) + 1)
        return max(1, bisect.bisect_right(rooms, allowed, key=sent))

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
