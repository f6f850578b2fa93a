"""JAX: four threads, each with its own devices, trace and compile a step at the same time."""

import threading

import jax
import numpy as np
from jax.sharding import Mesh

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal

w, x = normal(64, 64), normal(8, 64, seed=1)
found = {}


def train(number):
    mesh = Mesh(np.array(jax.devices()[2 * number : 2 * number + 2]), ("data",))
    mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data", method="bf16")
    found[number] = jax.jit(jax.grad(mean_loss_fn))(w[:, : 32 + 8 * number], x)


threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(found) == [0, 1, 2, 3], f"only {sorted(found)} ended well"
for number, grads in found.items():
    assert dq.vnmse(grads, jax.grad(loss_fn)(w[:, : 32 + 8 * number], x)) < 1e-4, number
