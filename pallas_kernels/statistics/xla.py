"""XLA base of `statistics`."""

import jax.numpy as jnp
from jax import Array

from dynamiq_jax.codec.norms import l2_norm


def statistics(rows: Array) -> tuple[Array, Array]:
    """See `pallas_kernels.statistics.api`."""
    rows = rows.astype(jnp.float32)
    return l2_norm(rows, axis=1), jnp.mean(rows, axis=1)
