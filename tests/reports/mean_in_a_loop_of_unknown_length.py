"""JAX: a collective in a while loop whose length depends on its result, alike on all workers."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

targets = normal(2, 2048)


def solve(target):
    def step(carry):
        w, number, _ = carry
        key = jax.random.fold_in(jax.random.key(0), number)
        mean = dq.pmean(w - target, "data", key=key, method="mxfp8")
        return w - 0.5 * mean, number + 1, jnp.sum(mean**2)

    start = jnp.zeros_like(target), 0, jnp.float32(jnp.inf)
    return jax.lax.while_loop(lambda carry: carry[2] > 1.0, step, start)


w, steps, _ = on_workers(solve, targets)
assert (w[0] == w[1]).all() and steps[0] == steps[1], "workers ended in different steps"
assert 3 < steps[0] < 50, steps
assert dq.vnmse(w[0], targets.mean(0)) < 0.01, "it did not converge"
