"""Two processes over a real network stack give the bits of the simulation on one device."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
from gradients import of_workers, vnmse
from workers import simulated

import dynamiq_jax as dq

HERE = pathlib.Path(__file__).parent
NUM_PROCESSES, SIZE, TIMEOUT = 2, 20_000, 150  # seconds, for both processes together


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(source: pathlib.Path, targets: list[pathlib.Path]) -> None:
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    paths = (str(HERE.parent), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    processes = []
    try:
        for rank, target in enumerate(targets):
            script = str(HERE / "multiprocess_worker.py")
            command = [sys.executable, script, port, str(rank), str(source), str(target)]
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_processes_hold_the_bits_of_the_simulation(tmp_path):
    gradients = of_workers(0, NUM_PROCESSES, SIZE)
    source = tmp_path / "gradients.npy"
    np.save(source, gradients)
    targets = [tmp_path / f"sum_{rank}.npy" for rank in range(NUM_PROCESSES)]
    run_processes(source, targets)
    expected = simulated(lambda key, g: dq.psum(g, "data", key=key))(jax.random.key(7), gradients)
    for target in targets:
        np.testing.assert_array_equal(np.load(target), expected[0])
    assert 1e-5 < vnmse(expected[0], gradients.sum(axis=0)) < 1e-1
