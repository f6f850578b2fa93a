"""JAX: the gradient of a number that all workers share, with checks of types and without.

jax#3970: a sum over devices inside a loss, with a gradient that is a multiple of the right one.
"""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

w, x = normal(16, 8), normal(8, 16, seed=1)


def tempered(w, x, temperature):
    return loss_fn(w, x * temperature)


exact = jax.grad(tempered, argnums=2)(w, x, 2.0)
for check_vma in (True, False):
    mean_loss_fn = dq.data_parallel(tempered, mesh=mesh_of(), axis_name="data", check_vma=check_vma)
    found = jax.grad(mean_loss_fn, argnums=2)(w, x, 2.0)
    assert abs(found - exact) < 1e-4 * abs(exact), (check_vma, found, exact)
