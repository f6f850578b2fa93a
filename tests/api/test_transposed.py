"""The gradient of `dq.all_gather` is a compressed sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import STOCHASTIC

WORKERS = 4
KEY = jax.random.key(5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("axis", "tiled"), ((0, True), (-1, True), (0, False)))
@pytest.mark.parametrize("check_vma", (True, False), ids=("checked", "unchecked"))
def test_the_transpose_of_a_gather_is_the_compressed_scatter(data_mesh, check_vma, axis, tiled):
    """Parameters live in parts; their gradients leave in the same parts, which are those of the
    whole sum.
    """
    shape = (WORKERS * 64, WORKERS * 16)
    own = of_workers(0, WORKERS, shape[0] * shape[1]).reshape(WORKERS, *shape)
    weights = np.random.default_rng(2).normal(size=shape).astype(np.float32)

    def local(part, own):
        part = part if tiled else part[0]
        own = own[0] if tiled else own[0].reshape(WORKERS, -1, shape[1])

        def loss(part):
            whole = dq.all_gather(part, "data", STOCHASTIC, key=KEY, axis=axis, tiled=tiled)
            return jnp.vdot(whole, own)

        grads = jax.grad(loss)(part)
        return grads if tiled else grads[None]

    stacked = weights if tiled else weights.reshape(WORKERS, -1, shape[1])
    split = P(None, "data") if axis == -1 else P("data")
    how = {"mesh": data_mesh(WORKERS), "in_specs": (split, P("data")), "out_specs": split}
    mapped = jax.shard_map(local, check_vma=check_vma, **how)
    grads = np.asarray(jax.jit(mapped)(stacked, own)).reshape(shape)
    assert 1e-7 < vnmse(grads, own.sum(axis=0, dtype=np.float64)) < 1e-4


def test_an_invarying_gather_is_not_differentiated(data_mesh):
    def local(part, own):
        def loss(part):
            whole = dq.all_gather(part, "data", key=KEY, tiled=True, to="invarying")
            return jnp.vdot(whole, own[0])

        return jax.grad(loss)(part)

    mapped = jax.shard_map(local, mesh=data_mesh(2), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"to='invarying', but .*Give to='varying'"):
        mapped(jnp.ones(4096), jnp.ones((2, 4096)))
