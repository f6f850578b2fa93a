"""Processes over a real network stack give the bits of the simulation on one device."""

import functools

import numpy as np
import pytest

from tests.support import processes
from tests.support.gradients import of_workers, vnmse
from tests.support.multiprocess_worker import CASES, LOCAL_DEVICES, NUM_PROCESSES, sums
from tests.support.workers import over

SIZE = 20_000


def gradients() -> np.ndarray:
    return of_workers(0, NUM_PROCESSES * LOCAL_DEVICES, SIZE)


@pytest.fixture(scope="module")
def results() -> list[dict[str, np.ndarray]]:
    """What the devices of each process got, by case: [devices, size]."""
    return processes.run(sums, [(gradients(),)] * NUM_PROCESSES, devices=LOCAL_DEVICES)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_hold_the_bits_of_the_simulation(results, name):
    axes, reduce = CASES[name]
    stacked = gradients()
    names = axes if isinstance(axes, tuple) else (axes,)
    if len(names) == 2:
        stacked = stacked.reshape(NUM_PROCESSES, LOCAL_DEVICES, SIZE)
    simulated = over(names, functools.partial(reduce, axis_name=axes))
    expected = np.asarray(simulated(stacked)).reshape(-1, SIZE)
    for of_process in results:
        assert of_process[name].shape == (LOCAL_DEVICES, SIZE)
        for replica in of_process[name]:
            np.testing.assert_array_equal(replica, expected[0])
    assert 1e-6 < vnmse(expected[0], gradients().sum(axis=0, dtype=np.float64)) < 5e-3
