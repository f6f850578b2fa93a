"""JAX: four threads, each with its own devices, trace and compile a step at the same time."""

import threading

import jax
import numpy as np
from jax.sharding import Mesh

import dynamiq_jax as dq
from tests.reports.setup import gradient, loss_fn, normal

w, x = normal(64, 64), normal(8, 64, seed=1)
found = {}


def train(number):
    mesh = Mesh(np.array(jax.devices()[2 * number : 2 * number + 2]), ("data",))
    found[number] = gradient(loss_fn, mesh)(w[:, : 32 + 8 * number], x)


threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(found) == [0, 1, 2, 3], f"only {sorted(found)} ended well"
for number, grads in found.items():
    assert dq.vnmse(grads, jax.grad(loss_fn)(w[:, : 32 + 8 * number], x)) < 1e-4, number
