"""Horovod (horovod#679): embedding gradients with a few rows on each worker, zeros elsewhere."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

used = jnp.array([[3, 200], [3, 15]])
gradients = jax.vmap(lambda rows, g: jnp.zeros((256, 256)).at[rows].set(g))(used, normal(2, 2, 256))
mean = on_workers(lambda g: dq.pmean(g, "data", key=jax.random.key(0), method="mxfp8"), gradients)[
    0
]
arrived = jnp.flatnonzero(jnp.any(mean != 0, axis=1)).tolist()
assert arrived == [3, 15, 200], arrived
assert dq.vnmse(mean, gradients.mean(0)) < 0.01, "rows that were used are not close"
