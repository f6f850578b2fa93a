"""Stripes: buckets that are alike, since each has an equal share of every leaf.

`Dealing` deals the rows of 256 coordinates of the leaves to the stripes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from pallas_kernels.codec import SUPER_GROUP_SIZE as ROW

# Numbers of stripes that are tried, for one that does not divide the rows of matrices.
_TRIED = 32


@dataclasses.dataclass(frozen=True)
class Stripe:
    """Place of a bucket among the buckets that share its leaves."""

    number: int
    count: int


def take_little_time() -> bool:
    """Return whether stripes take little time beside the codec on the default devices.

    XLA for TPUs moves the rows of stripes one by one, which takes longer than the kernels of the
    codec (benchmarks/aot/tpu.py).
    """
    return jax.default_backend() != "tpu"


def number_of_stripes(fewest: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return how many stripes to cut leaves into, at least `fewest`.

    If the number of stripes divides the number of rows of 256 in a row of a matrix, each stripe has
    the same columns of all rows, and the columns of a gradient may differ by magnitudes. So this
    function returns the first number that is coprime to the rows of 256 of all matrices. If it
    finds none, the matrices that violate this rule have as few coordinates as possible.
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
