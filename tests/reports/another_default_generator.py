"""JAX: another default generator of random numbers, as on TPUs for speed."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

gradients = normal(2, 2048)
with jax.default_prng_impl("rbg"):
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        mean = on_workers(
            lambda g, key=key: dq.pmean(g, "data", key=key, method="mxfp8"), gradients
        )
        assert (mean[0] == mean[1]).all(), "replicas differ"
        assert dq.vnmse(mean[0], gradients.mean(0)) < 0.05, "the mean is not close"
