"""Mosaic GPU kernel of `compress`: a hop that receives nothing."""

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.hop.mosaic_gpu import hop


def compress(
    rows: Array,
    order: Array,
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
) -> Array:
    """See `pallas_kernels.compress.api`."""
    nothing = jnp.zeros((0, layout.payload_bytes), jnp.uint8)
    return hop(nothing, rows, order, chunk, turn, seed, layout=layout)
