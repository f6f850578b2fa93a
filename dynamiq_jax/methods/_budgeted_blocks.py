"""Base of methods that sum as many blocks as fit into a number of bits."""

import abc
import dataclasses

from dynamiq_jax.methods._base import Call
from dynamiq_jax.methods._budget import check_bits, most_within
from dynamiq_jax.methods._sparse_blocks import SparseBlocks
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetedBlocks(SparseBlocks):
    """A method that has room for as many blocks as `bits` pay for, scores included."""

    bits: float = 2.0  # per coordinate of the bucket, scores included: with BF16, 1/8 of the blocks

    @override
    def __post_init__(self):
        super().__post_init__()
        taken_by = f", which the scores of blocks of {self.block_size} take"
        check_bits(self.bits, self.score_bits / self.block_size, taken_by)

    @property
    @abc.abstractmethod
    def score_bits(self) -> int:
        """Bits on the wire for the score of one block."""

    @override
    def num_chosen(self, call: Call) -> int:
        """Return the most blocks that keep the wire within `bits`."""
        most = self.num_blocks(call.size)
        return most_within(self.bits, call, most, lambda room: self.cost_of(room, call))
