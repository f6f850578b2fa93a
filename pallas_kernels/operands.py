"""Operands of the operations."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

Index = Array | int  # a number that may be traced


class LocalRows(NamedTuple):
    """Rows of a bucket that a worker holds, their places, and the seed of the rounding noise."""

    rows: Array  # local values in their original order, float [num_rows, 256]
    order: Array  # original row of every place, int32 [num_chunks, rows_per_chunk]
    seed: Array  # uint32 [2], the same on all workers


def scalar(value: Array | int) -> Array:
    """Convert a number to int32 [1]: the operands of a kernel are arrays in memory."""
    return jnp.asarray(value).astype(jnp.int32).reshape(1)
