"""JAX: an ensemble under vmap, each of whose members is data-parallel over all devices."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

members, x = normal(3, 64, 32), normal(8, 64, seed=1)
mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")
grads = jax.jit(jax.vmap(jax.grad(mean_loss_fn), in_axes=(0, None)))(members, x)
exact = jax.vmap(jax.grad(loss_fn), in_axes=(0, None))(members, x)
for member in range(3):
    assert dq.vnmse(grads[member], exact[member]) < 1e-4, member
