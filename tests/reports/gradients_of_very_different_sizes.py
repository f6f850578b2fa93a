"""DeepSpeed: one worker with a gradient a million times larger, as of a broken example."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

gradients = normal(4, 4096) * jnp.array([1e-3, 1.0, 1e3, 1e-12])[:, None]
mean = on_workers(lambda g: dq.pmean(g, "data", key=jax.random.key(0)), gradients)
assert (mean == mean[0]).all(), "replicas differ"
assert dq.vnmse(mean[0], gradients.mean(0)) < 0.05, dq.vnmse(mean[0], gradients.mean(0))
