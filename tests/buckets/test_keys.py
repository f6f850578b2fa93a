"""Workers whose keys differ: replicas never differ, whatever the method."""

import jax
import numpy as np
import pytest
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS, resolve_method
from tests.support.gradients import of_workers

WORKERS, SIZE = 4, 8192


def own_key():
    return jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))


def means(method: str) -> np.ndarray:
    """Means of workers whose keys differ: [workers, size]."""
    choice = dq.Compression(method, exact_below=0)

    def stateless(values):
        return dq.pmean(values, "data", choice, key=own_key())

    def stateful(values):  # the seed would be the same otherwise
        reduction = dq.all_reduce_gradients("data", choice, seed=lax.axis_index("data"))
        return reduction.update(values, reduction.init(values))[0]

    local = stateful if resolve_method(method).is_stateful else stateless
    values = of_workers(0, WORKERS, SIZE).reshape(WORKERS, 64, -1)
    return np.asarray(jax.jit(jax.vmap(local, axis_name="data"))(values))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", METHODS.own)
def test_replicas_are_the_same_bits(method):
    found = means(method)
    assert np.isfinite(found).all()
    for replica in found:
        np.testing.assert_array_equal(replica, found[0])
