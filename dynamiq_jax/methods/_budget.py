"""Budgets in bits for each coordinate, of methods that send a part of the coordinates."""

import bisect
import numbers
from collections.abc import Callable
from typing import Any

from dynamiq_jax._core import WireCost
from dynamiq_jax.methods._base import Call

_MAX_BITS = 32.0


def check_bits(bits: Any, low: float, taken_by: str = "") -> None:
    """Raise ValueError unless a budget is a number above `low` and at most 32.

    Args:
      bits: value to check, bits of a coordinate.
      low: largest value that is too small.
      taken_by: parts of a message that need `low` bits, for errors.
    """
    is_number = isinstance(bits, numbers.Real) and type(bits) is not bool
    if not (is_number and low < bits <= _MAX_BITS):
        raise ValueError(
            f"bits={bits!r} is out of range. Give more than {low:g}{taken_by}, and at most "
            f"{_MAX_BITS:g}."
        )


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
