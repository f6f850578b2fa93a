"""PyTorch AMP: an overflow in a small tensor has to stop the step, and must not spoil others."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

tree = {"kernel": normal(2, 2048), "bias": jnp.zeros((2, 4)).at[1, 2].set(-jnp.inf)}
mean = on_workers(lambda t: dq.pmean(t, "data", key=jax.random.key(0), method="mxfp8"), tree)
assert (mean["bias"][:, 2] == -jnp.inf).all(), mean["bias"]
assert jnp.isfinite(mean["bias"]).sum() == 6, mean["bias"]
assert jnp.isfinite(mean["kernel"]).all(), "the kernel is not finite"
