"""One process of research/tests/drop_compute/test_step.py."""

import os
import pathlib
import signal
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from dynamiq_research import Calibration, DropCompute, Latencies, SimulatedClock

NUM_PROCESSES, NUM_STEPS, MICRO_BATCHES = 2, 6, 5
INPUTS, OUTPUTS, ROWS, RATE = 48, 40, 4, 0.1
CALIBRATION = Calibration(skip=1, steps=2, max_drop=0.5)
FAULTY_STEP, FAULTY_MICRO_BATCH = 4, 2
HUNG = 1e3  # seconds that the clock shows in addition after a hang


def latencies() -> Latencies:
    """Process 1 is late in half of the steps."""
    times = np.random.default_rng(3).uniform(0.9, 1.1, (NUM_STEPS, NUM_PROCESSES, MICRO_BATCHES))
    times[1::2, 1] *= 3
    return Latencies(times, np.full(NUM_STEPS, 0.5))


def micro_batch(step: int, rank: int, index: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng((step, rank, index))
    return {
        name: random.standard_normal((ROWS, width)).astype(np.float32)
        for name, width in (("x", INPUTS), ("y", OUTPUTS))
    }


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


class Loader(Sequence):
    """Micro-batches of one step, made when they are asked for; one of them may be the last."""

    def __init__(self, folder: pathlib.Path, rank: int, step: int, fault: str):
        self.folder, self.rank, self.step, self.fault = folder, rank, step, fault

    def __len__(self):
        return MICRO_BATCHES

    def __getitem__(self, index):
        if (self.step, index) == (FAULTY_STEP, FAULTY_MICRO_BATCH):
            if self.fault == "hang":
                while not (self.folder / "release").exists():
                    time.sleep(0.01)
            elif self.fault != "none":
                os.kill(os.getpid(), signal.Signals[self.fault])
        (self.folder / f"asked_{self.step}_{self.rank}_{index}").touch()
        return micro_batch(self.step, self.rank, index)


def train(rank: int, folder: pathlib.Path, devices: int, fault: str) -> None:
    """Train a linear model with `DropCompute` over two processes of some devices each, on the clock
    of a table of latencies, and write its end to a file of the folder.

    `fault` is what happens to this process in a micro-batch: "none", "hang" until a file `release`
    is there, or a signal.
    """
    mesh = jax.make_mesh((NUM_PROCESSES * devices,), ("data",), axis_types=(AxisType.Auto,))
    table = SimulatedClock(latencies())

    def clock(step: int, worker: int, event: int) -> float:
        hung = fault == "hang" and step == FAULTY_STEP and event > FAULTY_MICRO_BATCH
        return table(step, worker, event) + HUNG * hung

    train_step = DropCompute(
        loss_fn=loss_fn,
        optimizer=optax.sgd(RATE),
        mesh=mesh,
        axis_name="data",
        method="exact",
        threshold=CALIBRATION,
        clock=clock,
    )
    state = train_step.init({"w": jnp.zeros((INPUTS, OUTPUTS))})
    done, losses = [], []
    for step in range(NUM_STEPS):
        metrics, state = train_step.step(Loader(folder, rank, step, fault), state)
        done.append(int(metrics.done))
        losses.append(float(metrics.loss))
        (folder / f"done_{step}_{rank}").touch()
    np.savez(
        folder / f"end_{rank}.npz",
        params=state.params["w"],
        threshold=state.threshold,
        done=done,
        losses=losses,
        times=train_step.latencies.times,
        rest=train_step.latencies.rest,
    )
