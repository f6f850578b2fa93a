"""PyTorch DDP: workers synchronize in some steps only (no_sync), chosen inside of the program."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

gradients = normal(2, 2048)


def step(g, number):
    key = jax.random.fold_in(jax.random.key(0), number)
    mean = lambda g: dq.pmean(g, "data", key=key, method="bf16")  # noqa: E731
    return jax.lax.cond(number % 2 == 0, mean, lambda g: g, g)


for number in (0, 1):
    got = on_workers(step, gradients, jnp.full(2, number))
    expected = gradients if number else jnp.broadcast_to(gradients.mean(0), (2, 2048))
    assert dq.vnmse(got, expected) < 1e-4, number
