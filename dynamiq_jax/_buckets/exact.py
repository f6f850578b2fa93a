"""Exact sums of leaves that are not compressed."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.cutting import cut, join
from dynamiq_jax._buckets.order import after
from pallas_kernels._jax.compat import varying_axes


def all_reduce(
    leaves: dict[int, Array], axes: Axes, divisor: int, token: Array | None = None
) -> tuple[dict[int, Array], list[Array]]:
    """Sum leaves exactly over all axes and divide them by `divisor`, in their own dtypes.

    All floating leaves that vary over the same axes are sent in one float32 message. Messages of
    float64 and of complex numbers keep these types, and each leaf of another type is a message of
    its own. All of them wait for the token. Quotients of integers are floored. A boolean result is
    True where any worker has True.

    Returns:
      Results by index, and an array of each message that arrived.
    """
    result: dict[int, Array] = {}
    arrived: list[Array] = []
    floats: dict[frozenset[str], dict[int, Array]] = {}
    for index, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float64:
            floats.setdefault(varying_axes(leaf), {})[index] = leaf
        elif leaf.dtype == jnp.bool_:
            arrived.append(lax.pmax(after(token, leaf.astype(jnp.uint8)), axes.names))
            result[index] = arrived[-1].astype(jnp.bool_)
        else:
            integral = jnp.issubdtype(leaf.dtype, jnp.integer)
            # The sum of small integers may not fit where their mean does.
            wide = leaf.astype(jnp.int32) if integral and leaf.dtype.itemsize < 4 else leaf
            total = lax.psum(after(token, wide), axes.names)
            arrived.append(total)
            if divisor != 1:
                by = np.array(divisor, wide.dtype)
                total = total // by if integral else total / by
            result[index] = total.astype(leaf.dtype)
    for group in floats.values():
        flat = join([leaf.astype(jnp.float32).reshape(1, -1) for leaf in group.values()])
        arrived.append(lax.psum(after(token, flat.reshape(-1)), axes.names))
        total = arrived[-1] * np.float32(1 / divisor)
        pieces = cut(total.reshape(1, -1), [leaf.size for leaf in group.values()])
        for (index, leaf), part in zip(group.items(), pieces, strict=True):
            result[index] = part.reshape(leaf.shape).astype(leaf.dtype)
    return result, arrived


def bytes_sent(axes: Axes, leaves: Sequence[Any]) -> int:
    """Count the bytes that each worker sends over the slow axis to sum leaves exactly.

    Leaves have a `shape` and a `dtype`.
    """
    # Booleans are sent as bytes, numbers of less than 32 bits as 32.
    item_bytes = [1 if leaf.dtype == bool else max(leaf.dtype.itemsize, 4) for leaf in leaves]
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    return round(axes.passes * sum(map(operator.mul, sizes, item_bytes)))


def bytes_of_owners(axes: Axes, methods: Iterable[Any]) -> int:
    """Count the bytes that each worker sends to compare the owners of states, if a method has one:
    a number of 32 bits.
    """
    is_stateful = any(method.is_stateful for method in methods)
    return bytes_sent(axes, [np.zeros((), np.int32)]) if is_stateful else 0


def scattered_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which an exact reduce-scatter sends a leaf of this dtype."""
    if dtype == jnp.bool_:
        return np.dtype(np.int32)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return dtype
