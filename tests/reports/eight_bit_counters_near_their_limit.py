"""PyTorch DDP: an average of 8-bit integers wraps around, since their sum is made in 8 bits."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import on_workers

for dtype, value in ((jnp.int8, 100), (jnp.int8, -100), (jnp.uint8, 250), (jnp.int16, 30_000)):
    counts = jnp.full((4, 8), value, dtype)
    mean = on_workers(lambda n: dq.pmean(n, "data", key=jax.random.key(0)), counts)
    assert mean.dtype == dtype and (mean == value).all(), (dtype, mean[0, 0])
