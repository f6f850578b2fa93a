"""JAX: of two processes, one evaluates on a mesh of its own devices, which the other never does.

A check that waits for all processes of the job, not for those of the mesh, would stop it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dynamiq_jax as dq
from tests.reports import process_with_a_mesh_of_its_own as this
from tests.reports.setup import gradient, loss_fn
from tests.support import processes


def evaluate(rank: int) -> None:
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    w, x = jnp.ones((64, 48 + 8 * rank)), jnp.ones((8, 64))
    for _ in range(1 + rank):  # the other process has one step more
        grads = gradient(loss_fn, mesh)(w, x)
        assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4


if __name__ == "__main__":
    processes.run(this.evaluate, [()] * 2, devices=2)
