"""XLA base of `compress`, and the encoding loop that it shares with `hop`."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout, WidthClass
from dynamiq_jax.codec.packing import planes, row_bytes
from dynamiq_jax.codec.rounding import offsets
from dynamiq_jax.codec.rows import encode_rows
from dynamiq_jax.compat import match_varying
from pallas_kernels.blocks import for_each_block

# Planes of each class, group scales, super-scales.
_Parts = tuple[tuple[tuple[Array, ...], ...], Array, Array]


def compress(
    rows: Array, order: Array, chunk: Array | int, hop: Array | int, seed: Array, *, layout: Layout
) -> Array:
    """See `pallas_kernels.compress.api`."""
    places = order[chunk]

    def values(width_class: WidthClass, first: Array | int, count: int) -> Array:
        return gather(rows, places, first, count)

    return encode_chunk(values, chunk, hop, seed, layout=layout, like=places)


def gather(rows: Array, places: Array, first: Array | int, count: int) -> Array:
    """Rows at places `first .. first + count` of a chunk, as float32 [count, 256]."""
    indices = lax.dynamic_slice_in_dim(places, first, count)
    return rows.at[indices].get(mode="promise_in_bounds", unique_indices=True).astype(jnp.float32)


def encode_chunk(
    values: Callable[[WidthClass, Array | int, int], Array],
    chunk: Array | int,
    hop: Array | int,
    seed: Array,
    *,
    layout: Layout,
    like: Array,
) -> Array:
    """Encodes a chunk whose rows are computed block by block.

    `values(width_class, first, count)` returns the float32 rows at places `first .. first + count`
    of the chunk, all of one class; `like` varies over the same mesh axes as they do.
    """
    places = layout.rows_per_chunk
    first_id = jnp.asarray(chunk).astype(jnp.uint32) * jnp.uint32(places)

    def step(width_class: WidthClass, start: Array | int, count: int, message: _Parts) -> _Parts:
        first = width_class.first_row + start
        ids = first_id + jnp.asarray(first).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
        encoded = encode_rows(
            values(width_class, first, count),
            offsets(ids, hop, seed, layout.rounding),
            width=width_class.width,
            nonuniformity=width_class.nonuniformity,
            group_size=layout.group_size,
        )
        codes, group_bytes, super_bits = message
        index = layout.classes.index(width_class)
        updated = tuple(
            lax.dynamic_update_slice_in_dim(plane, block, start, axis=0)
            for plane, block in zip(codes[index], encoded[0], strict=True)
        )
        return (
            (*codes[:index], updated, *codes[index + 1 :]),
            lax.dynamic_update_slice_in_dim(group_bytes, encoded[1], first, axis=0),
            lax.dynamic_update_slice_in_dim(super_bits, encoded[2], first, axis=0),
        )

    empty = (
        tuple(
            tuple(jnp.zeros((c.rows, row_bytes(bits)), jnp.uint8) for bits in planes(c.width))
            for c in layout.classes
        ),
        jnp.zeros((places, layout.groups), jnp.uint8),
        jnp.zeros((places,), jnp.uint16),
    )
    codes, group_bytes, super_bits = for_each_block(layout, step, match_varying(empty, like))
    return layout.message(sum(codes, ()), group_bytes, super_bits)
