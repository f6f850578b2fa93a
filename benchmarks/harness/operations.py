"""Operations of the codec that are timed, and the bytes that each has to move."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels import operations
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout

# Operations of a step of a ring, in the order in which a bucket meets them.
STEPS = ("statistics", "compress", "hop", "decompress")


def operation_of(operation: str, backend: str, layout: Layout) -> Callable[..., Any]:
    """Return an operation by a named backend, of arrays alone."""
    if operation == "compress":
        return functools.partial(operations.compress, layout=layout, implementation=backend)
    chosen: dict[str, Any] = {} if operation == "statistics" else {"layout": layout}
    return functools.partial(getattr(operations.by(backend), operation), **chosen)


def least_bytes(operation: str, layout: Layout, dtype: str) -> float:
    """Return the bytes of a coordinate of every input, read once, and output, written once."""
    local = jnp.dtype(dtype).itemsize
    wire = layout.payload_bytes / (layout.rows_per_chunk * SUPER_GROUP_SIZE)
    order = 4 / SUPER_GROUP_SIZE
    return {
        "statistics": local + 4 / SUPER_GROUP_SIZE,
        "compress": local + wire + order,
        "hop": local + 2 * wire + order,
        "decompress": wire + 4 + order,
    }[operation]
