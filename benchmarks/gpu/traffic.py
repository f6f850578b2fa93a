"""Bytes that an operation has to move, at whatever speed."""

import jax.numpy as jnp

from benchmarks.gpu.baselines import PLAIN_CODECS
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE


def floor_bytes(operation: str, implementation: str, layout: Layout, dtype: str) -> float:
    """Bytes that a coordinate has to move at least: every input read and output written once."""
    local = jnp.dtype(dtype).itemsize
    if implementation in PLAIN_CODECS:
        wire, places = PLAIN_CODECS[implementation].wire_bytes, 0.0
    else:
        wire = layout.payload_bytes / (layout.rows_per_chunk * SUPER_GROUP_SIZE)
        places = 4 / SUPER_GROUP_SIZE
    return {
        "statistics": local + 8 / SUPER_GROUP_SIZE,
        "order": 8 / SUPER_GROUP_SIZE,
        "compress": local + wire + places,
        "hop": local + 2 * wire + places,
        "decompress": wire + 4 + places,
    }[operation]
