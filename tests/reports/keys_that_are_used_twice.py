"""JAX (jax#192): a check that no key is used twice, which a library with one key must pass too."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

tree = {"kernel": normal(2, 2048), "bias": normal(2, 4)}
with jax.debug_key_reuse(True):
    mean = on_workers(lambda t: dq.pmean(t, "data", key=jax.random.key(0), method="mxfp8"), tree)
assert dq.vnmse(mean["kernel"][0], tree["kernel"].mean(0)) < 0.01
