"""Mosaic GPU kernel of `statistics`."""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec.norms import LARGEST_UNIT
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels import mosaic_gpu_launch as warpgroup


def statistics(rows: Array) -> tuple[Array, Array]:
    """See `pallas_kernels.statistics.api`."""
    if rows.shape[0] == 1:  # its results could not be stored: JAX takes them for scalars
        norms, means = statistics(jnp.concatenate([rows, rows]))
        return norms[:1], means[:1]
    num_rows = rows.shape[0]
    count, programs = warpgroup.blocks_of_rows(num_rows)
    shape = (count, *warpgroup.row_shape(warpgroup.LANES)[1:])

    def kernel(rows_ref, norms_ref, means_ref):
        first = lax.min(lax.axis_index("block") * count, jnp.int32(num_rows - count))
        pieces = warpgroup.load_rows(shape, rows_ref, first)
        largest = _over_lanes(jnp.max, [jnp.abs(values) for values in pieces], jnp.maximum)
        # As `dynamiq_jax.codec.norms.l2_norm`, which does not say how threads hold the values.
        unit, one = jnp.minimum(largest, LARGEST_UNIT), np.float32(1)
        inverse = jnp.where(unit > np.finfo(np.float32).tiny, one / unit, one)
        inverse = warpgroup.spread(inverse, shape, (0,))
        squares = _over_lanes(jnp.sum, [jnp.square(v * inverse) for v in pieces], operator.add)
        total = _over_lanes(jnp.sum, pieces, operator.add)
        warpgroup.store_column(norms_ref, first, unit * jnp.sqrt(squares))
        warpgroup.store_column(means_ref, first, total * np.float32(1 / SUPER_GROUP_SIZE))

    result = shape_like((num_rows,), jnp.float32, rows)
    return warpgroup.launch(
        kernel,
        (programs,),
        [rows.reshape(-1, *warpgroup.row_shape(warpgroup.LANES))],
        (result, result),
    )


def _over_lanes(reduction: Callable, pieces: list[Array], pairwise: Callable) -> Array:
    return reduction(functools.reduce(pairwise, pieces), axis=1)
