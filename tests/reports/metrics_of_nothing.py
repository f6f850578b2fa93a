"""optax: norms and errors of an empty tree, of zeros, and of integers, where 0/0 makes NaN."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import on_workers

trees = {
    "empty leaf": {"w": jnp.zeros((2, 0))},
    "integers": {"n": jnp.ones((2, 3), jnp.int32)},
    "zeros": {"w": jnp.zeros((2, 2048))},
}
for name, tree in trees.items():
    _, metrics = on_workers(
        lambda t: dq.pmean(t, "data", key=jax.random.key(0), method="bf16", with_metrics=True), tree
    )
    for metric, values in metrics.items():
        assert jnp.isfinite(values).all(), (name, metric, values)
    assert (metrics["error"] == 0).all(), (name, metrics["error"])
