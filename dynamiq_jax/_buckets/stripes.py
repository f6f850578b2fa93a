"""Stripes: buckets that each have a like share of every leaf, so that all of them are alike.

`Dealing` deals the rows of 256 coordinates of the leaves to the stripes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from pallas_kernels.codec import SUPER_GROUP_SIZE as ROW

# Stripes beyond the fewest that are tried for a number that no leaf has a structure of.
_TRIED = 32


@dataclasses.dataclass(frozen=True)
class Stripe:
    """Place of a bucket among those that share its leaves."""

    number: int
    count: int


def take_little_time() -> bool:
    """Return whether stripes take little time beside the codec on the default devices.

    XLA for TPUs moves row by row what it deals, and takes longer than kernels take for the codec
    (benchmarks/aot/tpu.py).
    """
    return jax.default_backend() != "tpu"


def number_of_stripes(fewest: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return how many stripes to cut leaves into, at least `fewest`.

    Where a number divides the rows of 256 in a row of a matrix, each stripe has the same columns of
    all its rows, and the columns of a gradient may differ by magnitudes. So the number is the first
    one that has no divisor in common with any of these, or with as few coordinates as possible.
    """
    if fewest == 1:
        return 1

    def coordinates_in_step(number: int) -> int:
        return sum(
            math.prod(shape)
            for shape in shapes
            if len(shape) > 1 and math.gcd(number, shape[-1] // math.gcd(shape[-1], ROW)) > 1
        )

    return min(range(fewest, fewest + _TRIED), key=coordinates_in_step)
