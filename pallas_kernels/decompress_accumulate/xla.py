"""XLA base of `decompress_accumulate`."""

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import for_each_block, partial_sum


def decompress_accumulate(
    payloads: Array, rows: Array, order: Array, chunk: Array | int, *, layout: Layout
) -> Array:
    """See `pallas_kernels.decompress_accumulate.api`."""
    total = partial_sum(payloads, rows, order[chunk], layout=layout)

    def step(first: Array | int, count: int, sums: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(sums, total(first, count), first, axis=0)

    empty = jnp.zeros((layout.rows_per_chunk, SUPER_GROUP_SIZE), jnp.float32)
    return for_each_block(layout.rows_per_chunk, step, match_varying(empty, payloads))
