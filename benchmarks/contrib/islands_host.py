"""One island of `benchmarks.contrib.islands`: a process that trains until it is killed or done."""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.training.small_lm.corpora import load_corpora, random_windows
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import adamw, loss_of
from benchmarks.training.small_lm.training import new_model
from dynamiq_jax.contrib import Islands, SharedFolder


def islands_of(config: dict, name: str) -> Islands:
    """Return an island of a run."""
    return Islands(
        transport=SharedFolder(config["folder"]),
        name=name,
        count=config["workers"],
        deadline=config["deadline"],
        outer=optax.sgd(1.0),
        method=config["method"],
    )


def main(path: str, index: int) -> None:
    """Train, and write down how long each exchange took."""
    config = json.loads(Path(path).read_text())
    corpora = load_corpora()
    structure, params = new_model(ModelConfig(corpora.vocabulary, width=config["width"]))
    with np.load(config["params"]) as known:
        leaves = [jnp.asarray(known[f"arr_{i}"]) for i in range(len(jax.tree.leaves(params)))]
    params = jax.tree.unflatten(jax.tree.structure(params), leaves)
    optimizer, loss_fn = adamw(config["learning_rate"]), loss_of(structure)

    @jax.jit
    def step(params, opt_state, tokens):
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    islands = islands_of(config, "abcdefgh"[index])
    state, opt_state = islands.join(params), optimizer.init(params)
    shape = (config["workers"], config["batch"], config["context"] + 1)
    while state.round < config["steps"] // config["every"]:
        own, number = state.reference, state.round
        for local in range(config["every"]):
            windows = random_windows(
                corpora.reference,
                count=config["workers"] * config["batch"],
                context=config["context"],
                seed=config["seed"],
                step=number * config["every"] + local,
            )
            own, opt_state = step(own, opt_state, jnp.asarray(windows.reshape(shape)[index]))
        jax.block_until_ready(own)
        start = time.monotonic()
        state = islands.exchange(own, state)
        with open(f"{path}.times", "a") as file:
            row = {"island": islands.name, "round": number, "seconds": time.monotonic() - start}
            file.write(json.dumps({**row, "after": state.round}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
