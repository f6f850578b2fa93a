"""Uneven workers: four devices, whose micro-batches take simulated lognormal times."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import dynamiq_jax as dq
from dynamiq_research import Calibration, DropCompute, Latencies, SimulatedClock

STEPS, WORKERS, MICRO_BATCHES = 60, 4, 8
random = np.random.default_rng(0)
truth = random.normal(size=(64, 32)).astype(np.float32)
mesh = jax.make_mesh(
    (WORKERS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:WORKERS]
)


def loss_fn(params, micro_batch):
    return jnp.mean((micro_batch["x"] @ params["w"] - micro_batch["y"]) ** 2)


def rows():
    """Draw a micro-batch: the rows of all workers of this process."""
    x = random.normal(size=(4 * WORKERS, 64)).astype(np.float32)
    return {"x": x, "y": x @ truth}


# On real workers, leave out `clock`, to measure, and `devices_per_worker`: a process is a worker.
times = 0.1 * random.lognormal(sigma=0.7, size=(STEPS, WORKERS, MICRO_BATCHES))
drop_compute = DropCompute(
    loss_fn=loss_fn,
    optimizer=optax.sgd(0.5, momentum=0.9),
    mesh=mesh,
    axis_name="data",
    method=dq.DynamiQ(bits=5),
    threshold=Calibration(skip=0, steps=20, max_drop=0.15),
    devices_per_worker=1,
    clock=SimulatedClock(Latencies(times, rest=np.full(STEPS, 0.1))),
)
state = drop_compute.init({"w": jnp.zeros((64, 32))})
history = []
for _ in range(STEPS):
    metrics, state = drop_compute.step([rows() for _ in range(MICRO_BATCHES)], state)
    history.append(metrics)

chosen = drop_compute.effect
print(f"stop after {chosen.threshold:.2f} s: {chosen.speedup:.2f}x")  # stop after 0.84 s: 1.10x
print(f"{np.mean([step.drop_rate for step in history[20:]]):.0%} dropped")  # 14% dropped
print(bool(history[-1].loss < 0.01 * history[0].loss))  # True
