"""JAX: a loss in a custom_vjp that calls jax.vjp inside, as those that clip cotangents do."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")


@jax.custom_vjp
def halved(w):
    return mean_loss_fn(w, x)


halved.defvjp(lambda w: jax.vjp(lambda w: mean_loss_fn(w, x), w), lambda pull, g: pull(g / 2))
grads = jax.jit(jax.grad(halved))(w)
assert dq.vnmse(2 * grads, jax.grad(loss_fn)(w, x)) < 1e-4, "not half of the gradient"
