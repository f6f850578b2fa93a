"""Budgets in bits for each coordinate, of methods that send a part of the coordinates."""

import abc
import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from dynamiq_jax.methods import Call, WireCost
from dynamiq_jax.parts import check_number, override
from dynamiq_research.topk_chunked.sparse_blocks import SparseBlocks

_MAX_BITS = 32.0


def check_bits(bits: Any, low: float, taken_by: str = "") -> None:
    """Raise ValueError unless a budget is a number above `low` and at most 32.

    Args:
      bits: value to check, bits of a coordinate.
      low: largest value that is too small.
      taken_by: parts of a message that need `low` bits, for errors.
    """
    remedy = f"more than {low:g}{taken_by}, and at most {_MAX_BITS:g}"
    check_number("bits", bits, math.nextafter(low, math.inf), _MAX_BITS, remedy)


def most_within(bits: float, call: Call, most: int, cost_of: Callable[[int], WireCost]) -> int:
    """Return the largest number of parts, from 1 to `most`, that keeps the wire within a budget.

    Args:
      bits: of one pass over the link, for each coordinate of the bucket.
      call: bucket, axis and topology.
      most: number of all parts.
      cost_of: bytes of a number of parts, which grow with it.
    """

    def sent(count: int) -> int:
        return call.topology.bytes_sent(cost_of(count), call.num_workers)

    allowed = bits / 8 * call.size * 2 * (call.num_workers - 1) / call.num_workers
    return max(1, bisect.bisect_right(range(1, most + 1), allowed, key=sent))


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
