"""Error of an all-reduce, estimated from the exact mean of a sample of coordinates.

Half of the sample is spread evenly over the rows of 256, and half by the squared norms of the rows
of the result. So the estimate is precise both for methods whose errors are equal in all rows and
for those whose errors follow the norms. Each coordinate counts by the inverse of the probability
with which it was drawn (Horvitz and Thompson, 1952).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import Bucket
from pallas_kernels._jax import compat
from pallas_kernels.codec import SUPER_GROUP_SIZE
from pallas_kernels.codec.rows import inverse_unit

_SHARE = 0.008  # of the bytes of a bucket
_LEAST, _MOST = 64, 2**14  # coordinates
_SALT = 0x65737469
# XLA may multiply its reciprocal by that of the number of workers, which must not underflow.
_LARGEST_SCALE = np.float32(2.0**112)


class Estimate(NamedTuple):
    """Sums over the coordinates of a bucket: float32 scalars, the same on all devices.

    Squares are in units of `scale**2`, about the largest magnitude: those of 1e-30 would underflow.
    """

    error: Array  # squared error
    square: Array  # squared norm of the exact result
    scale: Array
    fell_back: Array  # 1 if the bucket was sent again, exactly, and 0 otherwise
    bad_rows: Array  # rows of 256 in which the result is not finite
    rows: Array
    relative: Array  # squared errors of these rows over their squared norms in the result, added up

    @property
    def vnmse(self) -> Array:
        """Squared error over the squared norm; 0 if there is no error."""
        return jnp.where(self.error == 0, np.float32(0), self.error / self.square)

    def may_exceed(self, limit: float, variance: Array) -> Array:
        """Return whether the vNMSE may be above a limit, within two standard deviations."""
        return self.error + np.float32(2) * jnp.sqrt(variance) > np.float32(limit) * self.square


def joined(estimates: Sequence[Estimate]) -> Estimate:
    """Return the estimate of several buckets together."""
    scale = jnp.max(jnp.stack([each.scale for each in estimates]))
    weights = [_ratio(each.scale, scale) for each in estimates]
    alike = [  # in the same units
        each._replace(error=each.error * weight, square=each.square * weight)
        for each, weight in zip(estimates, weights, strict=True)
    ]
    sums = {
        name: jnp.sum(jnp.stack([getattr(each, name) for each in alike]))
        for name in Estimate._fields
        if name != "scale"
    }
    return Estimate(scale=scale, **sums)


def sample_size(bucket: Bucket, axes: Axes) -> int:
    """Return how many coordinates of a bucket are summed exactly."""
    passes = 2 * (axes.slow.size - 1) / axes.slow.size
    affordable = int(_SHARE * bucket.bytes_sent / (4 * passes)) if passes else _LEAST
    return min(max(affordable, _LEAST), _MOST, bucket.size)


def sample_bytes(bucket: Bucket, axes: Axes) -> int:
    """Count the bytes that each worker sends over the slow axis for the sample of a bucket."""
    return round(axes.passes * 4 * sample_size(bucket, axes))


def estimate(
    axes: Axes, bucket: Bucket, flat: Array, total: Array, key: Array, divisor: int
) -> tuple[Estimate, Array]:
    """Estimate the error of an all-reduce, and the variance of `error`.

    It takes the values of this worker and the total, [size].
    """
    number, value = sample_size(bucket, axes), total.astype(jnp.float32)
    rows = _rows_of(value)
    count = len(rows.squares)
    square = jnp.sum(rows.squares)
    share = jnp.where(square > 0, rows.squares / square, np.float32(1 / count))
    chances = np.float32(0.5) * (share + np.float32(1 / count))  # of rows
    index, is_inside, row = _drawn(chances, number, value.size, key)
    weight = jnp.where(
        is_inside, np.float32(SUPER_GROUP_SIZE / number) / chances[row], np.float32(0)
    )
    exact = lax.psum(flat[index].astype(jnp.float32), axes.names) * np.float32(1 / divisor)
    # Of both: a result that underflowed to zero has no magnitude of its own.
    scale = _over_shards(lax.pmax, bucket, jnp.maximum(rows.scale, _scale_of(exact)))
    unit = inverse_unit(scale)
    decoded = value[index] * unit
    off = decoded - exact * unit
    off = jnp.where(jnp.isfinite(off), off, np.float32(0))  # what is not finite is counted apart
    errors = weight * off**2
    error, spread = jnp.sum(errors), jnp.var(errors) * np.float32(number)
    own_square = rows.squares[row] * _ratio(rows.scale, scale)
    lost = jnp.where(off == 0, np.float32(0), weight / np.float32(SUPER_GROUP_SIZE))
    relative = jnp.sum(jnp.where(own_square > 0, errors / own_square, lost))
    cross = jnp.sum(weight * jnp.where(off == 0, np.float32(0), off * decoded))
    exact_square = square * _ratio(rows.scale, scale) - 2 * cross + error
    exact_square = jnp.maximum(exact_square, np.float32(0))
    sums = (error, spread, exact_square, *rows.counts, relative)
    error, variance, square, *of_rows = _over_shards(lax.psum, bucket, sums)
    return Estimate(error, square, scale, jnp.zeros_like(error), *of_rows), variance


def sent_again(bucket: Bucket, total: Array) -> Estimate:
    """Return the sums of an exact result, [size], of a bucket that was sent again."""
    rows = _rows_of(total.astype(jnp.float32))
    scale = _over_shards(lax.pmax, bucket, rows.scale)
    square = jnp.sum(rows.squares) * _ratio(rows.scale, scale)
    nothing = jnp.zeros_like(square)
    sums = (nothing, square, *rows.counts, nothing)
    error, square, *of_rows = _over_shards(lax.psum, bucket, sums)
    return Estimate(error, square, scale, jnp.ones_like(error), *of_rows)


class _Rows(NamedTuple):
    """Squared norms of rows of 256."""

    squares: Array  # in units of `scale**2`, 0 of rows that are not finite: float32 [rows]
    scale: Array  # largest magnitude
    counts: tuple[Array, Array]  # rows that are not finite, and all rows: float32 scalars


def _rows_of(value: Array) -> _Rows:
    """Return the squared norms of the rows of float32 [size]."""
    scale = _scale_of(value)
    rows = jnp.pad(value, (0, -value.size % SUPER_GROUP_SIZE)).reshape(-1, SUPER_GROUP_SIZE)
    squares = jnp.sum((rows * inverse_unit(scale)) ** 2, axis=1)  # at most 2^40 of finite rows
    is_bad = ~jnp.isfinite(squares)
    count = compat.match_varying(jnp.float32(len(squares)), squares)
    counts = jnp.sum(is_bad, dtype=jnp.float32), count
    return _Rows(jnp.where(is_bad, np.float32(0), squares), scale, counts)


def _scale_of(values: Array) -> Array:
    """Return the largest finite magnitude, up to `_LARGEST_SCALE`."""
    largest = jnp.max(jnp.where(jnp.isfinite(values), jnp.abs(values), np.float32(0)), initial=0)
    return jnp.minimum(largest, _LARGEST_SCALE)


def _ratio(scale: Array, largest: Array) -> Array:
    """Return the factor that converts squares in units of `scale**2` to units of `largest**2`."""
    return (scale * inverse_unit(largest)) ** 2


def _over_shards(reduce: Callable[..., Any], bucket: Bucket, values: Any) -> Any:
    """Reduce numbers over the axes that split the leaves of a bucket."""
    return reduce(values, bucket.split_over) if bucket.split_over else values


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
