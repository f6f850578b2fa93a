"""flax: the same array twice in the parameters, as an embedding that is the output layer too."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import mesh_of, normal

table, x = normal(64, 32), normal(8, 64, seed=1)
tied = {"embedding": table, "output": table}


def loss_fn(params, x):
    return ((x @ params["embedding"] @ params["output"].T) ** 2).mean()


mean_loss_fn = dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")
grads, exact = jax.grad(mean_loss_fn)(tied, x), jax.grad(loss_fn)(tied, x)
for name in tied:
    assert dq.vnmse(grads[name], exact[name]) < 1e-4, name
