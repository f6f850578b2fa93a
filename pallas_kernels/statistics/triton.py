"""Triton kernel of `statistics`."""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from dynamiq_jax.codec.norms import LARGEST_UNIT, scale_of
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels.triton_launch import Config, launch
from pallas_kernels.triton_rows import gather

_SHARE = np.float32(1 / SUPER_GROUP_SIZE)


def statistics(rows: Array, *, config: Config | None = None) -> tuple[Array, Array]:
    """See `pallas_kernels.statistics.api`."""
    config = config or Config()
    num_rows = rows.shape[0]

    def kernel(rows_ref, norms_ref, means_ref):
        first = pl.program_id(0) * config.rows
        row = lax.min(first + lax.iota(jnp.int32, config.rows), jnp.int32(num_rows - 1))
        pieces = gather(rows_ref, row)
        # Where the maximum drops a NaN, as Triton's does, the sum of squares still shows it.
        largest = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, pieces)), axis=1)
        unit = jnp.minimum(largest, LARGEST_UNIT)
        scaled = [piece * scale_of(unit)[:, None] for piece in pieces]
        squares = jnp.sum(functools.reduce(operator.add, (s * s for s in scaled)), axis=1)
        norms_ref[row] = unit * jnp.sqrt(squares)
        means_ref[row] = jnp.sum(functools.reduce(operator.add, pieces), axis=1) * _SHARE

    shape = shape_like((num_rows,), jnp.float32, rows)
    return launch(kernel, (config.programs(num_rows),), config, [rows], (shape, shape))
