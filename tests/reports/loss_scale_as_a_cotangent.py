"""DeepSpeed: a loss scale of 2^15 goes into the backward pass, and out of the gradients again."""

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(64, 32), normal(8, 64, seed=1)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="mxfp8")
_, backward = jax.vjp(lambda w: mean_loss_fn(w, x), w)
(plain,), (scaled,) = backward(jnp.float32(1)), backward(jnp.float32(2**15))
assert (scaled / 2**15 == plain).all(), "a power of two changes the rounding"
