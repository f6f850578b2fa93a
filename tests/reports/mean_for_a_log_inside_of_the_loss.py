"""JAX: a mean over workers for the log, inside of a loss that is differentiated (has_aux)."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

w, x = normal(64, 32), normal(2, 8, 64, seed=1)


def gradient(x, stopped):
    def loss_fn(w):
        out = x @ w
        logged = jax.lax.stop_gradient(out) if stopped else out
        options = dq.Compression(exact_below=0)
        return (out**2).mean(), dq.pmean(logged, "data", key=jax.random.key(0), method=options)

    return jax.value_and_grad(loss_fn, has_aux=True)(w)[0]


on_workers(lambda x: gradient(x, stopped=True)[1], x)
try:
    on_workers(lambda x: gradient(x, stopped=False)[1], x)
except ValueError as error:
    assert "cannot be differentiated" in str(error), error
else:
    raise AssertionError("the gradient of a rounded mean was taken")
