"""Base of methods that sum as many blocks as fit into a number of bits."""

import abc
import bisect
import dataclasses
import numbers

from dynamiq_jax.methods._base import Call
from dynamiq_jax.methods._sparse_blocks import SparseBlocks
from pallas_kernels.compat import override

_MAX_BITS = 32.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetedBlocks(SparseBlocks):
    """A method that has room for as many blocks as `bits` pay for, scores included."""

    bits: float = 2.0  # per coordinate of the bucket, scores included: with BF16, 1/8 of the blocks

    @override
    def __post_init__(self):
        super().__post_init__()
        low = self.score_bits / self.block_size
        is_number = isinstance(self.bits, numbers.Real) and type(self.bits) is not bool
        if not (is_number and low < self.bits <= _MAX_BITS):
            raise ValueError(
                f"bits={self.bits!r} is out of range. Give more than {low:g}, which the scores of "
                f"blocks of {self.block_size} take, and at most {_MAX_BITS:g}."
            )

    @property
    @abc.abstractmethod
    def score_bits(self) -> int:
        """Bits on the wire for the score of one block."""

    @override
    def num_chosen(self, call: Call) -> int:
        """Return the most blocks that keep the wire within `bits`."""

        def sent(room: int) -> int:
            return call.topology.bytes_sent(self.cost_of(room, call), call.num_workers)

        allowed = self.bits / 8 * call.size * 2 * (call.num_workers - 1) / call.num_workers
        rooms = range(1, self.num_blocks(call.size) + 1)
        return max(1, bisect.bisect_right(rooms, allowed, key=sent))
