"""State that a backward pass returns, by the name that flax gives it: no function averages it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import training

KEY = jax.random.key(0)
WORKERS, ROWS, WIDTH = 4, 16, 32
NAME = "_overwrite_with_gradient"


def rows():
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def tree_of(state=(1024,), dtype=jnp.float32):
    return {"params": {"w": jnp.ones((32, 64))}, NAME: {"dense": jnp.ones(state, dtype)}}


def in_map(function, mesh, out=P()):
    return jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=out, check_vma=False)


def of_gradients(tree, method="dynamiq"):
    reduction = dq.all_reduce_gradients("data", method=method)
    return reduction.update(tree, reduction.init(tree))[0]


def of_local_sgd(tree):
    step = training.LocalSGD(axis_name="data", every=1)
    return step.update(tree, step.init(tree), due=step.due(0))[0]


IN_MAPS = {
    "psum": lambda tree: dq.psum(tree, "data", key=KEY),
    "pmean": lambda tree: dq.pmean(tree, "data", key=KEY),
    "pmean, uncompressed": lambda tree: dq.pmean(
        tree, "data", key=KEY, method={".*": "uncompressed"}
    ),
    "pmean, metrics": lambda tree: dq.pmean(tree, "data", key=KEY, with_metrics=True)[0],
    "psum_scatter": lambda tree: dq.psum_scatter(tree, "data", key=KEY, tiled=True),
    "all_reduce_gradients": of_gradients,
    "all_reduce_gradients, with a state": functools.partial(of_gradients, method="ef+dynamiq"),
    "LocalSGD": of_local_sgd,
}


@pytest.mark.parametrize("state", ((1024,), (4,)), ids=str)
@pytest.mark.parametrize("name", IN_MAPS)
def test_no_function_averages_a_leaf_of_that_name(name, state, data_mesh):
    """Of any size: a mean of the exact ones would have no meaning either."""
    with pytest.raises(ValueError, match=rf"tree\['{NAME}'\]\['dense'\] is no gradient"):
        jax.eval_shape(in_map(lambda: IN_MAPS[name](tree_of(state)), data_mesh(WORKERS)))


def test_what_is_no_mean_of_a_state_is_allowed(data_mesh):
    """Gathers, and means of integers."""
    mesh = data_mesh(WORKERS)
    gather = lambda: dq.all_gather(tree_of(), "data", key=KEY, tiled=True)  # noqa: E731
    gathered = jax.eval_shape(in_map(gather, mesh))
    assert gathered[NAME]["dense"].shape == (WORKERS * 1024,)
    count = lambda: dq.pmean(tree_of(dtype=jnp.int32), "data", key=KEY)  # noqa: E731
    assert jax.eval_shape(in_map(count, mesh))[NAME]["dense"].shape == (1024,)


class Quantized(linen.Module):
    """Two layers of flax in FP8."""

    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = linen.Dense(WIDTH, dot_general_cls=linen.Fp8DirectDotGeneralOp)(x)
        return x


def fp8_loss(variables, x):
    return jnp.mean(Quantized().apply(variables, x) ** 2)


def test_the_remedy_is_the_state_of_one_device(data_mesh):
    """Of the inputs and the weights. Cotangents are those of a worker's mean, n times larger."""

    def local(variables, x):
        grads = jax.grad(fp8_loss)(variables, x)
        state = lax.pmax(grads.pop(NAME), "data")
        return dq.pmean(grads, "data", key=KEY), state

    step = jax.shard_map(
        local, mesh=data_mesh(WORKERS), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    variables = Quantized().init(KEY, rows())
    grads, state = jax.jit(step)(variables, rows())
    expected = jax.grad(fp8_loss)(variables, rows())
    for path, leaf in jax.tree.leaves_with_path(state):
        of_one = functools.reduce(lambda tree, key: tree[key.key], path, expected[NAME])
        factor = WORKERS if path[-1].key == "output_grad_amax_history" else 1
        is_of_batch = path[0].key == "Dense_0" and factor == 1
        np.testing.assert_allclose(leaf, factor * of_one, rtol=1e-6 if is_of_batch else 0.2)
        assert leaf[0] > 0
    assert dq.vnmse(grads["params"], expected["params"]) < 0.02
