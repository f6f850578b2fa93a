"""JAX: of two processes, one evaluates on a mesh of its own devices, which the other never does.

A check that waits for all processes of the job, not for those of the mesh, would stop it.
"""

import jax
import numpy as np
from jax.sharding import Mesh

import dynamiq_jax as dq
from tests.reports import process_with_a_mesh_of_its_own as this
from tests.reports.setup import loss_fn
from tests.support import processes


def evaluate(rank: int) -> None:
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    w, x = np.ones((64, 48 + 8 * rank), np.float32), np.ones((8, 64), np.float32)
    for _ in range(1 + rank):  # the other process has one loss more
        mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data", method="bf16")
        assert mean_loss_fn(w, x) == loss_fn(w, x)
        grads = jax.jit(jax.grad(mean_loss_fn))(w, x)
        assert dq.vnmse(grads, jax.grad(loss_fn)(w, x)) < 1e-4


if __name__ == "__main__":
    processes.run(this.evaluate, [()] * 2, devices=2)
