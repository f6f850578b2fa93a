"""One process of test_failures.py."""

import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dynamiq_jax.training import LocalSGD
from tests.support.workers import STOCHASTIC

NUM_PROCESSES, EVERY, NUM_STEPS = 2, 4, 8
PATIENCE = 60  # seconds


def train(rank: int, folder: pathlib.Path, fault: str) -> np.ndarray:
    """Train by local SGD over two processes, and return the reference at the end.

    The file RANK.STEP is there after each local step. `fault` is what process 1 does before its
    first local step: "none", "late" (it waits until process 0 has no local step left to take) or
    the name of a signal that it sends itself.
    """
    mesh = jax.make_mesh((NUM_PROCESSES,), ("data",), axis_types=(AxisType.Auto,))
    local_sgd = LocalSGD(axis_name="data", every=EVERY, method=STOCHASTIC)
    specs = (P("data"), local_sgd.state_specs)

    def step(stacked, state, due):
        own = stacked[0] + jnp.sin(stacked[0] + jax.lax.axis_index("data"))
        own, state = local_sgd.update(own, state, due=due)
        return own[None], state

    def compiled(due):
        mapped = jax.shard_map(
            lambda *carry: step(*carry, due), mesh=mesh, in_specs=specs, out_specs=specs
        )
        return jax.jit(mapped)

    start = np.zeros((64, 64), np.float32)
    init = jax.shard_map(
        lambda params: (jax.lax.pcast(params, "data", to="varying")[None], local_sgd.init(params)),
        mesh=mesh,
        in_specs=P(),
        out_specs=specs,
    )
    carry = jax.jit(init)(start)
    steps = {due: compiled(due) for due in map(local_sgd.due, range(EVERY))}
    # Compiled before anything happens, as compilation may wait for the other process.
    programs = {due: step.lower(*carry).compile() for due, step in steps.items()}
    if rank == 1 and fault == "late":
        deadline = time.monotonic() + PATIENCE
        while not (folder / f"0.{EVERY - 2}").exists():
            if time.monotonic() > deadline:
                sys.exit("the other process has not got ahead")
            time.sleep(0.01)
    elif rank == 1 and fault != "none":
        os.kill(os.getpid(), signal.Signals[fault])
    for number in range(NUM_STEPS):
        carry = jax.block_until_ready(programs[local_sgd.due(number)](*carry))
        (folder / f"{rank}.{number}").touch()
    return np.asarray(carry[1].reference.addressable_data(0))
