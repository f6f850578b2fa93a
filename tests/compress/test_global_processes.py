"""Steps that the compiler partitions, in several processes."""

import jax
import numpy as np
import pytest

from tests.support import processes
from tests.support.global_step_worker import train
from tests.support.workers import STOCHASTIC

# Steps, processes, and devices of each.
JOBS = {
    "short": (5, 2, 2),
    "four processes": pytest.param(500, 4, 1, marks=pytest.mark.slow),
    "two processes of two devices": pytest.param(500, 2, 2, marks=pytest.mark.slow),
}


@pytest.mark.parametrize(("steps", "count", "devices"), JOBS.values(), ids=JOBS)
def test_processes_have_the_parameters_of_each_other(steps, count, devices):
    """Statistics of the batch are sums of the compiler, between compressed ones."""
    results = processes.run(train, [(steps, STOCHASTIC)] * count, devices=devices, timeout=600)
    for losses, params in results[1:]:
        assert losses == results[0][0]
        for got, wanted in zip(params, results[0][1], strict=True):
            np.testing.assert_array_equal(got, wanted)
    losses, _ = results[0]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exactly, _ = train(0, 5, "exact")
    np.testing.assert_allclose(losses[:5], exactly, rtol=0.02)
    assert losses[:5] != exactly
