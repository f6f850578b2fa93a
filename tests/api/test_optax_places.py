"""Places of wrappers of optax around the all-reduce, as the table of the page on optax has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.gradients import of_workers

WORKERS, SHAPE = 4, (32, 64)
REDUCE = functools.partial(dq.all_reduce_gradients, "data", method="exact")
CLIP = optax.clip_by_global_norm(0.5)
CHECKS = pytest.mark.parametrize("check_vma", (True, False), ids=("checked", "unchecked"))


@pytest.fixture(autouse=True)
def promotion():
    """Adam of optax promotes its count."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(optimizer, gradients, mesh, check_vma):
    """Updates of all steps, of gradients [steps, workers, *shape]."""

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(None, "data"), out_specs=P(), check_vma=check_vma)
    def steps(local):
        state, params, found = optimizer.init(jnp.zeros(SHAPE)), jnp.zeros(SHAPE), []
        for gradient in local[:, 0]:
            updates, state = optimizer.update(gradient, state, params)
            found.append(updates)
        return jnp.stack(found)

    return steps(gradients)


def gradients():
    return of_workers(0, 4 * WORKERS, 32 * 64).reshape(4, WORKERS, *SHAPE)


@CHECKS
def test_clipping_in_front_is_of_each_worker(data_mesh, check_vma):
    optimizer = optax.chain(CLIP, REDUCE())
    given = gradients()
    found = run(optimizer, given, data_mesh(WORKERS), check_vma)
    norms = np.sqrt(np.sum(given**2, axis=(2, 3), keepdims=True))
    expected = np.mean(given * np.minimum(1, 0.5 / norms), axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("wrap", "error"),
    (
        (
            lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
            "apply_if_finite behind dq.all_reduce",
        ),
        (lambda tx: optax.apply_if_finite(tx, 5), "must have equal output types"),
    ),
    ids=("MultiSteps", "apply_if_finite"),
)
def test_around_the_reduction_types_refuse_them(data_mesh, wrap, error):
    with pytest.raises((TypeError, ValueError), match=error):
        run(wrap(REDUCE()), gradients(), data_mesh(WORKERS), check_vma=True)
