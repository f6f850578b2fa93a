"""An island of its own process: `island_worker FOLDER NAME ROUNDS`. It prints its last state."""

import sys
import time

import jax
import jax.numpy as jnp
import optax

from dynamiq_jax.contrib import Islands, SharedFolder
from dynamiq_jax.contrib.islands.islands import _hash_of

TARGET = jax.random.normal(jax.random.key(0), (64, 32))
PARAMS = {"w": jnp.zeros((64, 32))}


def main(folder: str, name: str, rounds: int) -> None:
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
    print(state.round, _hash_of(state), error)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
