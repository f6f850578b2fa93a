"""The process of one emulated host, which trains a small language model with the others:
`python -m benchmarks.training.emulated_training.host '{...}'`; `run` is the other end.
"""

import itertools
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.emulation.host import Host, serve
from benchmarks.training.emulated_training.rounds import Rounds, parse_rounds
from benchmarks.training.small_lm.corpora import random_windows
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import make_optimizer
from benchmarks.training.small_lm.training import (
    CompiledTraining,
    abstract_model,
    data_parallel,
    local_sgd,
)
from dynamiq_jax._measurement.devices import barrier
from dynamiq_jax._measurement.settings import PSUM


class TrainingHost(Host):
    """One worker of the training."""

    def join(self) -> dict[str, Any]:
        """Join the other hosts and read the text."""
        answer, config = super().join(), self.config
        self._compiled: dict[str | None, CompiledTraining] = {}  # by setting
        self._trainings: dict[str | None, _Training] = {}  # of these, by setting
        self._everyone, self._alone = _mesh(jax.devices()), _mesh(jax.local_devices())
        with np.load(Path(config["folder"]) / "text.npz") as text:
            self._corpus = text["corpus"]
            self._held_out = text["held_out"][self.index :: self.num_hosts]
        self._structure, self._params = abstract_model(ModelConfig(**config["model"]))
        self._evaluate = jax.jit(_evaluation_of(self._structure))
        return answer

    def begin(self, setting: str | None, seed: int) -> dict[str, Any]:
        """Take one step to compile and to warm up, then go back to the pre-trained weights.

        Args:
          setting: how to average gradients; None to train without any network.
          seed: chooses weights, batches and rounding.
        """
        mesh = self._alone if setting is None else self._everyone
        rounds = parse_rounds(PSUM if setting is None else setting)
        if setting not in self._compiled:
            self._compiled[setting] = self._build(mesh, rounds)
        compiled, batches = self._compiled[setting], self._batches(mesh, seed, rounds.times)

        def start() -> _Training:
            return _Training(compiled, self._params_of(mesh, seed), batches, rounds.times)

        start().advance(1)
        self._trainings[setting] = start()
        return {}

    def advance(self, setting: str | None, steps: int) -> dict[str, Any]:
        """Train on, and return how long every step took until its result was there."""
        barrier()
        return {"seconds": self._trainings[setting].advance(steps)}

    def checksum(self, setting: str) -> dict[str, Any]:
        """Return the CRC-32 of this host's copy of the parameters."""
        checksum = 0
        for leaf in jax.tree.leaves(self._trainings[setting].own_params()):
            checksum = zlib.crc32(np.asarray(leaf), checksum)
        return {"checksum": checksum}

    def evaluate(self, setting: str) -> dict[str, Any]:
        """Return loss and accuracy on this host's share of the held-out text."""
        loss, accuracy = self._evaluate(self._trainings[setting].own_params(), self._held_out)
        return {"loss": float(loss), "accuracy": float(accuracy)}

    def _build(self, mesh: Mesh, rounds: Rounds) -> CompiledTraining:
        config = self.config
        optimizer = make_optimizer(config["learning_rate"], config["steps"] * rounds.times)
        args = self._structure, optimizer, mesh, rounds.setting
        if rounds.every is None:
            return data_parallel(*args)
        return local_sgd(*args, rounds.every)

    def _params_of(self, mesh: Mesh, seed: int) -> Any:
        """Read pre-trained parameters, a copy on every device."""
        everywhere = NamedSharding(mesh, P())
        with np.load(Path(self.config["folder"]) / f"weights{seed}.npz") as file:
            leaves = [
                jax.make_array_from_process_local_data(everywhere, file[name])
                for name in file.files
            ]
        return jax.tree.unflatten(jax.tree.structure(self._params), leaves)

    def _batches(self, mesh: Mesh, seed: int, times: int) -> list[tuple[jax.Array, jax.Array]]:
        """Return tokens, int32 [hosts * batch, context + 1], and key of each step: the same windows
        for every setting, of which this host has its own.

        Args:
          mesh: of the hosts that train.
          seed: chooses windows.
          times: steps for each step that is configured.
        """
        config = self.config
        everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        key = jax.jit(
            lambda step: jax.random.fold_in(jax.random.key(seed), step), out_shardings=everywhere
        )
        count, own = self.num_hosts * config["batch"], self.index * config["batch"]
        batches = []
        for step in range(config["steps"] * times):
            windows = random_windows(
                self._corpus, count=count, context=config["context"], seed=seed, step=step
            )[own : own + config["batch"]]
            tokens = jax.make_array_from_process_local_data(split, windows)
            batches.append((tokens, key(np.uint32(step))))
        return batches


class _Training:
    """One run: its state, and the batches that are left."""

    def __init__(
        self,
        compiled: CompiledTraining,
        params: Any,
        batches: Iterable[tuple[jax.Array, jax.Array]],
        times: int,
    ):
        self._step, self._batches, self._times = compiled.step, iter(batches), times
        self._state = params, compiled.init(params)

    def advance(self, steps: int) -> list[float]:
        """Take some steps, each of `times` local ones, and return the seconds of each."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            for tokens, key in itertools.islice(self._batches, self._times):
                params, state, _ = jax.block_until_ready(self._step(*self._state, tokens, key))
                self._state = params, state
            seconds.append(time.perf_counter() - start)
        return seconds

    def own_params(self) -> Any:
        """Return this process's copy of the parameters."""
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), self._state[0])


def _mesh(devices: list[jax.Device]) -> Mesh:
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def _evaluation_of(structure: nnx.GraphDef) -> Any:
    """Return a function of parameters and tokens to cross entropy (nats a token) and next-token
    accuracy.
    """

    def evaluate(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        model, targets = nnx.merge(structure, params), tokens[:, 1:]
        logits = model(tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return loss, jnp.mean(jnp.argmax(logits, axis=-1) == targets)

    return evaluate


if __name__ == "__main__":
    serve(sys.argv[1], TrainingHost)
