"""One island of `benchmarks.islands.rounds`: a process that trains until it is killed or done."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.training.small_lm.corpora import load_corpora, worker_windows
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import adamw, loss_of
from benchmarks.training.small_lm.training import new_model
from dynamiq_jax.islands import Islands, SharedFolder


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


def _loaded(path: Path, like: Any) -> Any:
    """Return a tree whose leaves were saved with `np.savez`."""
    with np.load(path) as known:
        leaves = [jnp.asarray(known[f"arr_{i}"]) for i in range(len(jax.tree.leaves(like)))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def main(path: str, index: int) -> None:
    """Train, and write down how long each exchange took."""
    config = json.loads(Path(path).read_text())
    corpora = load_corpora()
    structure, params = new_model(ModelConfig(corpora.vocabulary, width=config["width"]))
    params = _loaded(Path(config["params"]), params)
    optimizer, loss_fn = adamw(config["learning_rate"]), loss_of(structure)

    @jax.jit
    def step(params, opt_state, tokens):
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    islands = islands_of(config, "abcdefgh"[index])
    state, opt_state = islands.join(params), optimizer.init(params)
    own_file = Path(f"{path}.{islands.name}.npz")
    if config["keeps_optimizer"] and own_file.exists():
        opt_state = _loaded(own_file, opt_state)
    while state.round < config["steps"] // config["every"]:
        own, number = state.reference, state.round
        for local in range(config["every"]):
            windows = worker_windows(
                corpora.reference,
                workers=config["workers"],
                batch=config["batch"],
                context=config["context"],
                seed=config["seed"],
                step=number * config["every"] + local,
            )
            own, opt_state = step(own, opt_state, jnp.asarray(windows[index]))
        jax.block_until_ready(own)
        start = time.monotonic()
        state = islands.exchange(own, state)
        if config["keeps_optimizer"]:
            np.savez(f"{own_file}.new.npz", *jax.device_get(jax.tree.leaves(opt_state)))
            os.replace(f"{own_file}.new.npz", own_file)
        with open(f"{path}.times", "a") as file:
            row = {"island": islands.name, "round": number, "seconds": time.monotonic() - start}
            file.write(json.dumps({**row, "after": state.round}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
