"""XLA base of `compress`, and the encoding loop that it shares with `hop`."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.codec.rounding import offsets
from dynamiq_jax.codec.rows import encode_rows
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import for_each_block, gather

_Parts = tuple[Array, Array, Array]  # codes, group scales, super-scales


def compress(
    rows: Array, order: Array, chunk: Array | int, turn: Array | int, seed: Array, *, layout: Layout
) -> Array:
    """See `pallas_kernels.compress.api`."""
    places = order[chunk]

    def values(first: Array | int, count: int) -> Array:
        return gather(rows, places, first, count)

    return encode_chunk(values, chunk, turn, seed, layout=layout, like=places)


def encode_chunk(
    values: Callable[[Array | int, int], Array],
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
    like: Array,
) -> Array:
    """Encodes a chunk whose rows are computed block by block.

    `values(first, count)` returns the float32 rows at places `first .. first + count` of the chunk;
    `like` varies over the same mesh axes as they do.
    """
    places = layout.rows_per_chunk
    first_id = jnp.asarray(chunk).astype(jnp.uint32) * jnp.uint32(places)

    def step(first: Array | int, count: int, parts: _Parts) -> _Parts:
        ids = first_id + jnp.asarray(first).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
        encoded = encode_rows(
            values(first, count),
            offsets(ids, turn, seed, layout.rounding),
            layout.levels(first, count),
            group_size=layout.group_size,
        )
        codes, group_bytes, super_bits = (
            lax.dynamic_update_slice_in_dim(part, block, first, axis=0)
            for part, block in zip(parts, encoded, strict=True)
        )
        return codes, group_bytes, super_bits

    empty = (
        jnp.zeros((places, SUPER_GROUP_SIZE), jnp.uint16),
        jnp.zeros((places, layout.groups), jnp.uint8),
        jnp.zeros((places,), jnp.uint16),
    )
    return layout.pack(*for_each_block(places, step, match_varying(empty, like)))
