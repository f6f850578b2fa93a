"""Error of an all-reduce, estimated from the exact mean of a sample of coordinates.

Half of the sample is spread evenly over the rows of 256, and half by the squared norms of the rows
of the result. So the estimate is precise both for methods whose errors are equal in all rows and
for those whose errors follow the norms. Each coordinate counts by the inverse of the probability
with which it was drawn (Horvitz and Thompson, 1952).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.plan import Bucket
from pallas_kernels import compat
from pallas_kernels.codec import SUPER_GROUP_SIZE
from pallas_kernels.codec.rows import LARGEST_UNIT, inverse_unit

_SHARE = 0.008  # of the bytes of a bucket
_LEAST, _MOST = 64, 2**14  # coordinates
_SALT = 0x65737469


class Estimate(NamedTuple):
    """Sums over the coordinates of a bucket: float32 scalars, the same on all devices.

    Squares are in units of `scale**2`, the largest magnitude: those of 1e-30 would underflow.
    """

    error: Array  # squared error
    variance: Array  # of `error` as an estimate
    square: Array  # squared norm of the exact result
    scale: Array
    bad_rows: Array  # rows of 256 in which the result is not finite
    rows: Array

    @property
    def vnmse(self) -> Array:
        """Squared error over the squared norm; 0 if there is no error."""
        return jnp.where(self.error == 0, np.float32(0), self.error / self.square)

    def may_exceed(self, limit: float) -> Array:
        """Return whether the vNMSE may be above a limit: within two standard deviations."""
        return (
            self.error + np.float32(2) * jnp.sqrt(self.variance) > np.float32(limit) * self.square
        )


def joined(estimates: Sequence[Estimate]) -> Estimate:
    """Return the estimate of several buckets together."""
    scale = jnp.max(jnp.stack([each.scale for each in estimates]))
    inverse = inverse_unit(scale)
    weights = [(each.scale * inverse) ** 2 for each in estimates]

    def total(field: str, power: int) -> Array:
        values = [getattr(each, field) for each in estimates]
        terms = [v * w**power for v, w in zip(values, weights, strict=True)]
        return jnp.sum(jnp.stack(terms))

    return Estimate(
        error=total("error", 1),
        variance=total("variance", 2),
        square=total("square", 1),
        scale=scale,
        bad_rows=total("bad_rows", 0),
        rows=total("rows", 0),
    )


def sample_size(bucket: Bucket, axes: Axes) -> int:
    """Return how many coordinates of a bucket are summed exactly."""
    passes = 2 * (axes.slow.size - 1) / axes.slow.size
    affordable = int(_SHARE * bucket.bytes_sent / (4 * passes)) if passes else _LEAST
    return min(max(affordable, _LEAST), _MOST, bucket.size)


def sample_bytes(bucket: Bucket, axes: Axes) -> int:
    """Count the bytes that each worker sends for the sample of a bucket."""
    passes = 2 * (axes.num_workers - 1) / axes.num_workers
    return round(passes * 4 * sample_size(bucket, axes))


def estimate(
    axes: Axes, bucket: Bucket, flat: Array, total: Array, key: Array, divisor: int
) -> Estimate:
    """Estimate the error of the all-reduce of a bucket.

    Args:
      axes: axes of the collective.
      bucket: the bucket.
      flat: values of this worker, [size].
      total: the result, [size], the same on all workers.
      key: typed PRNG key, the same on all workers.
      divisor: what the exact sum is divided by.
    """
    number, value = sample_size(bucket, axes), total.astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isfinite(value), jnp.abs(value), np.float32(0)), initial=0)
    if bucket.split_over:
        largest = lax.pmax(largest, bucket.split_over)
    scale = jnp.minimum(largest, LARGEST_UNIT)
    unit = inverse_unit(scale)
    rows = jnp.pad(value, (0, -value.size % SUPER_GROUP_SIZE)).reshape(-1, SUPER_GROUP_SIZE)
    squares = jnp.sum((rows * unit) ** 2, axis=1)  # at most 4096 where all values are finite
    is_bad = ~jnp.isfinite(squares)
    squares = jnp.where(is_bad, np.float32(0), squares)
    square = jnp.sum(squares)
    share = jnp.where(square > 0, squares / square, np.float32(1 / len(squares)))
    chances = np.float32(0.5) * (share + np.float32(1 / len(squares)))  # of rows
    index, is_inside, row = _drawn(chances, number, value.size, key)
    weight = jnp.where(
        is_inside, np.float32(SUPER_GROUP_SIZE / number) / chances[row], np.float32(0)
    )
    exact = lax.psum(flat[index].astype(jnp.float32), axes.names) * np.float32(1 / divisor)
    found = value[index] * unit
    off = found - exact * unit
    off = jnp.where(jnp.isfinite(off), off, np.float32(0))  # what is not finite is counted apart
    errors = weight * off**2
    error, spread = jnp.sum(errors), jnp.var(errors) * np.float32(number)
    exact_square = (
        square - 2 * jnp.sum(weight * jnp.where(off == 0, np.float32(0), off * found)) + error
    )
    sums = (
        error,
        spread,
        jnp.maximum(exact_square, np.float32(0)),
        jnp.sum(is_bad, dtype=jnp.float32),
        compat.match_varying(jnp.float32(len(squares)), error),
    )
    if bucket.split_over:
        sums = lax.psum(sums, bucket.split_over)
    error, variance, square, bad_rows, number_of_rows = sums
    return Estimate(error, variance, square, scale, bad_rows, number_of_rows)


def _drawn(chances: Array, number: int, size: int, key: Array) -> tuple[Array, Array, Array]:
    """Draw coordinates: their index, whether they are no padding, and their row.

    Rows are drawn at even steps along the sum of their chances, from a random start in each step.
    """
    row_key, place_key = jax.random.split(jax.random.fold_in(key, _SALT))
    ends = jnp.cumsum(chances)
    even = np.arange(number, dtype=np.float32)
    starts = even + jax.random.uniform(row_key, (number,), jnp.float32)
    row = jnp.searchsorted(ends, starts * (ends[-1] / np.float32(number)), method="sort")
    row = jnp.minimum(row, len(chances) - 1)
    place = jax.random.randint(place_key, (number,), 0, SUPER_GROUP_SIZE, jnp.int32)
    index = row * SUPER_GROUP_SIZE + place
    return jnp.minimum(index, size - 1), index < size, row
