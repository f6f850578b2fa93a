"""Values that tie the schedule of a program to its data, without changing a result."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec


def never(value: Array) -> Array:
    """Return False, bool scalar, as soon as a value is available, and not before.

    XLA removes `lax.optimization_barrier` before it schedules a program. It does not find that this
    comparison is always false.

    Args:
      value: an array that is not empty.
    """
    first = _first(value).real
    if jnp.issubdtype(first.dtype, jnp.floating):
        wide = first if jnp.finfo(first.dtype).bits >= 8 else first.astype(jnp.float32)
        first = lax.bitcast_convert_type(wide, jnp.dtype(f"uint{8 * wide.dtype.itemsize}"))
    return (first.astype(jnp.uint32) & 255) >> 8 != 0


def _first(value: Array) -> Array:
    """Return the first element of an array, which may be split over explicit axes."""
    place = (0,) * value.ndim
    sharding = jax.typeof(value).sharding
    if not any(each is not None for each in sharding.spec):
        return value[place]
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.sharding.auto_axes(lambda v: v[place], out_sharding=whole)(value)


def zeros_after(value: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros that are made when a value is available, and vary over the same axes."""
    # Others XLA makes when a program starts, and they take memory until they are used.
    return jnp.broadcast_to(never(value).astype(dtype), shape)
