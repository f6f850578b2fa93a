"""Rows to places: which row of the bucket goes to which place of which chunk, at which width.

Rows are dealt to the chunks by their norms, so that all chunks have nearly the same widths. This
takes no communication: all workers hold the same integers, and a stable sort of these gives the
same order everywhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.shapes import Float, Int32, Shaped, UInt16, UInt32
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.scales import LARGEST_BITS

_WEIGHT_BITS = 15  # of a bfloat16 without its sign: norms are not negative
_LARGEST = np.uint16((1 << _WEIGHT_BITS) - 1)

# Norms above 2^126 count as the least one whose energy is not zero. Rows that have one are lost,
# with a magnitude that no scale can carry, or close to that: they must not take bits from others.
_LARGEST_NORM = np.uint16(LARGEST_BITS >> np.uint32(16))
_LEAST_NORM = np.uint16(2)


class Places(NamedTuple):
    """Places of the rows of a bucket, or without the leading axis those of one chunk."""

    order: Int32[Array, "*chunks rows"]  # original row of every place
    widths: Int32[Array, "*chunks rows"]  # of every place, not increasing
    starts: Int32[Array, "*chunks 17"]  # where every plane starts, and the last ends, in units

    def at(self, chunk: Index) -> "Places":
        """Return the places of one chunk."""
        return Places(*(lax.dynamic_index_in_dim(leaf, chunk, keepdims=False) for leaf in self))


class LocalRows(NamedTuple):
    """Rows of a bucket that a worker holds, their places, and the seed of the rounding noise."""

    rows: Float[Array, "num_rows 256"]  # local values in their original order
    places: Places
    seed: UInt32[Array, "2"]  # the same on all workers


def place_rows(
    norm_bits: UInt16[Array, "num_rows"],
    layout: Layout,
    *,
    consecutive: bool = False,
    sort: Callable[[Array], Array] | None = None,
    solve: Callable[[Array], Array] | None = None,
) -> Places:
    """Assign rows to places by their norms, largest first, and solve for their widths.

    Args:
      norm_bits: norms as bits of bfloat16; NaN where a norm is not finite.
      consecutive: chunk c holds the c-th part of the rows, each chunk ordered by itself.
      sort: function that sorts words in place of `sort_words`.
      solve: solver of widths by energies in place of that of the layout.
    """
    norm_bits = jnp.where(norm_bits > _LARGEST_NORM, _LEAST_NORM, norm_bits)
    if consecutive:
        order, norm_bits = rank(
            norm_bits.reshape(layout.num_chunks, layout.rows_per_chunk), sort=sort
        )
        order += np.arange(layout.num_chunks, dtype=np.int32)[:, None] * layout.rows_per_chunk
    else:  # rank p goes to chunk p mod num_chunks
        shape = layout.rows_per_chunk, layout.num_chunks
        order, norm_bits = (ranked.reshape(shape).T for ranked in rank(norm_bits, sort=sort))
    # The bits of a float are a logarithm, if linear within each octave: here 128 steps for one of
    # the norm, which is two of the energy.
    energies = (norm_bits >> np.uint16(1)).astype(jnp.int32)
    return make_places(order, (solve or layout.solve)(energies))


def make_places(
    order: Int32[Array, "*chunks rows"], plane_rows: Int32[Array, "*chunks 16"]
) -> Places:
    """Return the places for the rows of every plane."""
    shape = (*(1,) * (plane_rows.ndim - 1), order.shape[-1], 1)
    index = jnp.arange(order.shape[-1], dtype=jnp.int32).reshape(shape)
    has_bit = index < plane_rows[..., None, :]
    widths = jnp.sum(has_bit, axis=-1, dtype=jnp.int32)
    ends = jnp.cumsum(plane_rows, axis=-1, dtype=jnp.int32)
    return Places(order, widths, jnp.pad(ends, [(0, 0)] * (ends.ndim - 1) + [(1, 0)]))


def rank(
    weights: UInt16[Array, "*chunks rows"], *, sort: Callable[[Array], Array] | None = None
) -> tuple[Int32[Array, "*chunks rows"], UInt16[Array, "*chunks rows"]]:
    """Sort weights along the last axis, largest first, and equal ones by their index.

    Weights are below 2^15, such as the bits of a bfloat16 that is not negative. `sort` sorts words
    in place of `sort_words`.

    Returns:
      Indices, and the sorted weights.
    """
    index_bits = (weights.shape[-1] - 1).bit_length()
    if _WEIGHT_BITS + index_bits > 32:
        indices = jnp.argsort(_LARGEST - weights, axis=-1, stable=True).astype(jnp.int32)
        return indices, jnp.take_along_axis(weights, indices, axis=-1)
    # Both in one word: one array of integers sorts five times faster than keys with values.
    index = lax.broadcasted_iota(jnp.uint32, weights.shape, weights.ndim - 1)
    keys = (_LARGEST - weights).astype(jnp.uint32) << np.uint32(index_bits) | index
    keys = (sort or sort_words)(keys)
    indices = (keys & np.uint32((1 << index_bits) - 1)).astype(jnp.int32)
    return indices, _LARGEST - (keys >> np.uint32(index_bits)).astype(jnp.uint16)


def sort_words(words: Array) -> Array:
    """Sort words that all differ, uint32 [..., count], along the last axis."""
    # A stable sort would carry an index, and a TPU compile it for much longer.
    return lax.sort(words, is_stable=False)


def restore_rows(
    rows: Shaped[Array, "num_rows 256"], order: Int32[Array, "*chunks rows"]
) -> Shaped[Array, "num_rows 256"]:
    """Put rows that `order` gathered back at their indices."""
    places = order.reshape(-1)
    index = jnp.arange(places.size, dtype=places.dtype)
    at = jnp.zeros_like(places).at[places]
    inverse = at.set(index, unique_indices=True, mode="promise_in_bounds")
    return rows.at[inverse].get(unique_indices=True, mode="promise_in_bounds")
