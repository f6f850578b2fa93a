"""Islands: three jobs train one model over a folder; one is killed, and starts again."""

import os
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import optax

from dynamiq_jax.islands import Islands, SharedFolder

keys = jax.random.split(jax.random.key(0), 3)
teacher = jax.random.normal(keys[0], (32, 16))
params = {
    "hidden": jax.random.normal(keys[1], (32, 256)) / 32**0.5,
    "out": jax.random.normal(keys[2], (256, 16)) / 256**0.5,
}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - jnp.tanh(x @ teacher)) ** 2)


def train(name, folder):  # a job of its own, on any machine that reaches the folder
    islands = Islands(transport=SharedFolder(folder), name=name, count=3, deadline=20)
    optimizer, gradient = optax.adamw(1e-2), jax.jit(jax.grad(loss_fn))
    state, own_state = islands.join(params), optimizer.init(params)
    while state.round < 20:
        own = state.reference
        for step in range(10):
            key = jax.random.fold_in(jax.random.key(ord(name)), 10 * state.round + step)
            grads = gradient(own, jax.random.normal(key, (64, 32)))
            updates, own_state = optimizer.update(grads, own_state, own)
            own = optax.apply_updates(own, updates)
        state = islands.exchange(own, state)
    return state


def start(name, folder):
    command = [sys.executable, "-m", "examples.islands"]
    return subprocess.Popen(command, env={**os.environ, "ISLAND": name, "FOLDER": folder})


if "ISLAND" in os.environ:
    train(os.environ["ISLAND"], os.environ["FOLDER"])
else:
    folder = tempfile.mkdtemp()
    jobs = [start(name, folder) for name in "abc"]
    while not os.path.exists(f"{folder}/decision/00000004"):
        time.sleep(0.01)
    jobs[2].kill()
    jobs.append(start("c", folder))
    print([job.wait() for job in jobs])  # [0, 0, -9, 0]
    state = train("d", folder)  # a fourth one joins after the last round
    test = jax.random.normal(jax.random.key(2), (1024, 32))
    print(bool(loss_fn(state.reference, test) < 0.2 * loss_fn(params, test)))  # True
