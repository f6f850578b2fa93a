"""An island of a process of its own, for test_islands.py."""

import time

import jax.numpy as jnp
import numpy as np
import optax

from dynamiq_jax.islands import Islands, SharedFolder
from dynamiq_jax.islands._state import hash_of_state

TARGET = np.random.default_rng(0).standard_normal((64, 32), np.float32)
PARAMS = {"w": jnp.zeros((64, 32))}


def train(rank: int, folder: str, name: str, rounds: int) -> tuple[int, str, float]:
    """Train to a number of rounds: the last round, the hash of the state, and the error."""
    islands = Islands(
        transport=SharedFolder(folder),
        name=name,
        count=3,
        deadline=300.0,
        outer=optax.sgd(1.0),
        store_every=4,
    )
    state = islands.join(PARAMS)
    while state.round < rounds:
        w = state.reference["w"]
        for _ in range(10):
            w = w - 0.05 * (w - TARGET)
            time.sleep(0.03)  # the test kills it here
        state = islands.exchange({"w": w}, state)
    error = float(jnp.linalg.norm(state.reference["w"] - TARGET) / jnp.linalg.norm(TARGET))
    return state.round, hash_of_state(state), error
