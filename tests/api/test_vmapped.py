"""Collectives under `jax.vmap` over a further axis, as for several models at once: the results are
those of a loop over that axis, bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from tests.conformance.table import CHUNKED, TRACED
from tests.support.gradients import of_workers
from tests.support.workers import STOCHASTIC, mapped

NUM_WORKERS, MODELS, SHAPE = 4, 2, (12, 256)
KEY = jax.random.key(3)
# The other rules of these are those of the kept ones.
SAME = {"mxfp6", "mxfp4", "mxint8", "paper"}
STATELESS = [name for name, case in TRACED.items() if not case.is_stateful and name not in SAME]
STATEFUL = [name for name, case in TRACED.items() if case.is_stateful]


def gradients() -> np.ndarray:
    """Gradients of several models, float32 [workers, models, *shape], of very different sizes."""
    values = of_workers(0, NUM_WORKERS * MODELS, int(np.prod(SHAPE)))
    values = values.reshape(NUM_WORKERS, MODELS, *SHAPE)
    return values * np.float32([1, 1000]).reshape(1, MODELS, 1, 1)


def check_equals_loop(mesh, fn, atol=0.0):
    """Check a function of one model on one worker under `vmap` against a loop over models."""

    values = gradients()
    found = jax.jit(mapped(jax.vmap(fn), mesh))(values)
    one = jax.jit(mapped(fn, mesh))
    expected = [one(values[:, model]) for model in range(MODELS)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *expected)
    is_near = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    jax.tree.map(is_near, found, expected)
    untyped = jax.eval_shape(mapped(jax.vmap(fn), mesh, check_vma=False), values)
    assert jax.tree.map(jnp.shape, untyped) == jax.tree.map(jnp.shape, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STATELESS)
def test_sums_and_their_halves(name, data_mesh):
    arguments = {"method": dq.Compression(TRACED[name], exact_below=0), "key": KEY}

    def fn(gradient):
        mean = dq.pmean(gradient, "data", **arguments)
        if name not in CHUNKED:
            return mean
        part = dq.psum_scatter(gradient, "data", tiled=True, **arguments)
        return mean, part, dq.all_gather(part, "data", tiled=True, **arguments)

    check_equals_loop(data_mesh(NUM_WORKERS), fn)


@pytest.mark.parametrize("name", STATEFUL)
def test_steps_with_a_state(name, data_mesh):
    reduce = dq.all_reduce_gradients("data", method=TRACED[name])

    def fn(gradient):
        _, state = reduce.update(gradient, reduce.init(gradient))
        mean, state = reduce.update(gradient, state)
        return mean, state

    # XLA fuses the choice of the states to go on with, and so rounds a residual, in another way.
    check_equals_loop(data_mesh(NUM_WORKERS), fn, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ("butterfly", "all_to_all"))
def test_topologies(topology, data_mesh):
    arguments = {"method": dq.Compression(STOCHASTIC, topology), "key": KEY}
    check_equals_loop(data_mesh(NUM_WORKERS), lambda g: dq.psum(g, "data", **arguments))
