"""Two processes over a real network stack give the bits of the simulation on one device."""

import jax
import numpy as np
import processes
from gradients import of_workers, vnmse
from workers import simulated

import dynamiq_jax as dq

NUM_PROCESSES, SIZE = 2, 20_000


def test_two_processes_hold_the_bits_of_the_simulation(tmp_path):
    gradients = of_workers(0, NUM_PROCESSES, SIZE)
    source = tmp_path / "gradients.npy"
    np.save(source, gradients)
    targets = [tmp_path / f"sum_{rank}.npy" for rank in range(NUM_PROCESSES)]
    processes.run("multiprocess_worker.py", [(source, target) for target in targets])
    expected = simulated(lambda key, g: dq.psum(g, "data", key=key))(jax.random.key(7), gradients)
    for target in targets:
        np.testing.assert_array_equal(np.load(target), expected[0])
    assert 1e-5 < vnmse(expected[0], gradients.sum(axis=0)) < 1e-1
