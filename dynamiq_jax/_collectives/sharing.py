"""Gain that buckets of DynamiQ would have from sharing their bits, from the errors of all of them.

Each bit of a coordinate divides its squared error by four. So bits are shared best when all buckets
have the same squared error for a coordinate, but for those that have no more bits to give. That
level follows from the budget: what some buckets gain in bits, others lose.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._collectives.error_estimate import Estimate
from dynamiq_jax.methods import DynamiQ
from pallas_kernels.codec.rows import inverse_unit


def gain_of_sharing(
    buckets: Sequence[Bucket], estimates: Sequence[Estimate]
) -> tuple[Array, Array]:
    """Return the gain of sharing bits, and the number of the bucket with the most to give.

    Args:
      buckets: buckets of a plan.
      estimates: estimated errors of all of them.

    Returns:
      Two float32 scalars. The gain is the sum of the squared errors of the buckets of DynamiQ over
      what it would be; 1 if fewer than two have an error.
    """
    which = [n for n, bucket in enumerate(buckets) if isinstance(bucket.method, DynamiQ)]
    if len(which) < 2:
        return jnp.float32(1), jnp.float32(which[0] if which else 0)
    error, scale, rows = (
        jnp.stack([getattr(estimates[n], field) for n in which])
        for field in ("error", "scale", "rows")
    )
    scale = scale * inverse_unit(jnp.max(scale))
    takes_part = (error > 0) & (scale > 0)
    sizes = jnp.where(takes_part, rows, np.float32(0))
    error, scale = (jnp.where(takes_part, each, np.float32(1)) for each in (error, scale))
    # Half the logarithm of the error of a coordinate, now and after giving all spare bits.
    now = jnp.log2(scale) + np.float32(0.5) * (jnp.log2(error) - jnp.log2(rows))
    spare = np.array([_spare_bits(buckets[n]) for n in which], np.float32)
    last = now + spare
    # One level for all would meet the budget, were it not for buckets that run out of bits. Those
    # run out that reach their last at a lower level. Any other choice of them makes it too low.
    nobody = jnp.zeros((1, len(which)), bool)
    runs_out = jnp.concatenate([nobody, last[None, :] <= last[:, None]])  # [choices, buckets]
    given = jnp.sum(jnp.where(runs_out, (sizes * spare)[None, :], np.float32(0)), axis=1)
    others = jnp.where(runs_out, np.float32(0), sizes[None, :])
    total = jnp.sum(others, axis=1)
    levels = (jnp.sum(others * now[None, :], axis=1) - given) / jnp.maximum(total, np.float32(1))
    level = jnp.max(jnp.where(total > 0, levels, jnp.min(now)))
    after = jnp.minimum(last, level)
    before, shared = (jnp.sum(sizes * jnp.exp2(2 * (each - level))) for each in (now, after))
    several = jnp.sum(takes_part, dtype=jnp.int32) > 1
    gain = jnp.where(several, before / jnp.where(several, shared, np.float32(1)), np.float32(1))
    most = jnp.argmax(jnp.where(takes_part, after - now, -jnp.inf))
    return gain, jnp.asarray(np.array(which, np.float32))[most]


def _spare_bits(bucket: Bucket) -> float:
    """Return the bits of a coordinate that a bucket can do without."""
    assert isinstance(bucket.method, DynamiQ)
    return bucket.method.bits - bucket.method.bit_range[0]
