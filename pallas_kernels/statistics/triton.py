"""Triton kernel of `statistics`."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from dynamiq_jax.codec.norms import l2_norm
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.compat import shape_like
from pallas_kernels.triton_launch import Config, launch


def statistics(rows: Array, *, config: Config | None = None) -> tuple[Array, Array]:
    """See `pallas_kernels.statistics.api`."""
    config = config or Config()
    num_rows = rows.shape[0]

    def kernel(rows_ref, norms_ref, means_ref):
        first = pl.program_id(0) * config.rows
        row = lax.min(first + lax.iota(jnp.int32, config.rows), jnp.int32(num_rows - 1))
        lanes = lax.iota(jnp.int32, SUPER_GROUP_SIZE)
        values = rows_ref[row[:, None], lanes[None, :]].astype(jnp.float32)
        # Where the maximum drops a NaN, as Triton's does, the sum of squares still shows it.
        norms_ref[row] = l2_norm(values, axis=1)
        means_ref[row] = jnp.sum(values, axis=1) * np.float32(1 / SUPER_GROUP_SIZE)

    shape = shape_like((num_rows,), jnp.float32, rows)
    return launch(kernel, (config.programs(num_rows),), config, [rows], (shape, shape))
