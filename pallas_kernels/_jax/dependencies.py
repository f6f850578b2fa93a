"""Values that tie the schedule of a program to its data, without changing a result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec


def never(value: Array) -> Array:
    """Return False, bool scalar, once an array with elements is available, and not before.

    XLA removes `lax.optimization_barrier` before it schedules a program. It does not find that this
    comparison is always false.
    """
    # Functions of `jax.lax` are traced in a fifth of the time of operators.
    first = _first(value)
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if jnp.issubdtype(first.dtype, jnp.floating):
        wide = first if jnp.finfo(first.dtype).bits >= 8 else first.astype(jnp.float32)
        first = lax.bitcast_convert_type(wide, jnp.dtype(f"uint{8 * wide.dtype.itemsize}"))
    low = lax.bitwise_and(lax.convert_element_type(first, np.uint32), np.uint32(255))
    return lax.ne(lax.shift_right_logical(low, np.uint32(8)), np.uint32(0))


def _first(value: Array) -> Array:
    """Return the first element of an array, which may be split over explicit axes."""
    sharding = jax.typeof(value).sharding
    if not any(each is not None for each in sharding.spec):
        return _corner(value)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    explicit = sharding.mesh.explicit_axes
    return jax.sharding.auto_axes(_corner, axes=explicit, out_sharding=whole)(value)


def _corner(value: Array) -> Array:
    dims = range(value.ndim)
    return lax.squeeze(lax.slice(value, [0 for _ in dims], [1 for _ in dims]), tuple(dims))


def zeros_after(value: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros that are made when a value is available, and vary over the same axes."""
    # Others XLA makes when a program starts, and they take memory until they are used.
    return jnp.broadcast_to(never(value).astype(dtype), shape)
