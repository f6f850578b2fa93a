"""JAX: a mesh whose devices are not in the order of their numbers, as topologies choose it."""

import jax
import numpy as np
from jax.sharding import Mesh

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal

mesh = Mesh(np.array(jax.devices()[3::-1]), ("data",))
w, x = normal(32, 32), normal(8, 32, seed=1)
grad_fn = dq.value_and_grad(
    lambda w, x: (loss_fn(w, x), x @ w),
    mesh=mesh,
    axis_name="data",
    has_aux=True,
    aux="rows",
    method="bf16",
    options=dq.Options(exact_below=0),
)
(_, rows), grads = grad_fn(w, x, key=jax.random.key(0))
assert dq.vnmse(rows, x @ w) < 1e-9, "rows of aux are in another order than the batch"
assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4, "the gradient is not that of the batch"
