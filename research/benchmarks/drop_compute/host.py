"""A process that trains a small language model with `DropCompute`, the last of which sleeps:
`python -m research.benchmarks.drop_compute.host '{...}'`; `run` is the other end.
"""

import dataclasses
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from benchmarks.emulation.host import Host, serve
from benchmarks.training.small_lm.corpora import random_windows
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import loss_of
from benchmarks.training.small_lm.training import abstract_model
from dynamiq_jax._measurement.devices import barrier
from dynamiq_research import Calibration, DropCompute, DropComputeState


class UnevenHost(Host):
    """One worker. The last host is late: it sleeps before each of its micro-batches."""

    def join(self) -> dict[str, Any]:
        """Join the other hosts, read the text and compile."""
        answer, config = super().join(), self.config
        with np.load(Path(config["folder"]) / "text.npz") as text:
            self._corpus, self._held_out = text["corpus"], text["held_out"]
        self._structure, self._params = abstract_model(ModelConfig(**config["model"]))
        self._evaluate = jax.jit(loss_of(self._structure))
        self._mesh = jax.make_mesh((self.num_hosts,), ("data",), axis_types=(AxisType.Auto,))
        return answer

    def begin(self, threshold: bool, seed: int) -> dict[str, Any]:
        """Start a run with or without a threshold; compile in a step that does not count."""
        config = self.config
        warm_up = optax.linear_schedule(0.0, config["learning_rate"], config["warm_up"])
        calibration = Calibration(**config["calibration"])
        self._step = DropCompute(
            loss_fn=loss_of(self._structure),
            optimizer=optax.adamw(warm_up, b2=0.95),
            mesh=self._mesh,
            axis_name="data",
            method=config["method"],
            threshold=calibration if threshold else np.inf,
        )
        with np.load(Path(config["folder"]) / "weights.npz") as file:
            params = jax.tree.unflatten(jax.tree.structure(self._params), list(file.values()))
        first = self._step.init(params)
        unlimited = first._replace(threshold=jnp.full_like(first.threshold, np.inf))
        jax.block_until_ready(self._step.step(self._micro_batches(seed, 0), unlimited))
        self._state: DropComputeState = self._step.init(params)
        self._seed, self._number = seed, 0
        return {}

    def advance(self, steps: int) -> dict[str, Any]:
        """Train on; return the seconds and the share of dropped micro-batches of each step."""
        seconds, dropped = [], []
        barrier()
        for _ in range(steps):
            start = time.perf_counter()
            batches = self._micro_batches(self._seed, self._number)
            metrics, self._state = jax.block_until_ready(self._step.step(batches, self._state))
            seconds.append(time.perf_counter() - start)
            dropped.append(float(metrics.drop_rate))
            self._number += 1
        return {"seconds": seconds, "dropped": dropped}

    def evaluate(self) -> dict[str, Any]:
        """Return the loss on held-out text, and a checksum of this process's parameters."""
        own = jax.tree.map(lambda leaf: leaf.addressable_data(0), self._state.params)
        checksum = 0
        for leaf in jax.tree.leaves(own):
            checksum = zlib.crc32(np.asarray(leaf), checksum)
        loss = float(self._evaluate(own, self._held_out)) if self.index == 0 else None
        return {"loss": loss, "checksum": checksum}

    def chosen(self) -> dict[str, Any]:
        """Return the threshold that was chosen, and the effect that it promises."""
        effect, latencies = self._step.effect, self._step.latencies
        assert effect is not None and latencies is not None
        return dataclasses.asdict(effect) | {
            "mean_seconds": latencies.times.mean(axis=(0, 2)).tolist(),
            "rest_seconds": float(latencies.rest.mean()),
        }

    def _micro_batches(self, seed: int, step: int) -> "LateMicroBatches":
        config = self.config
        count = self.num_hosts * config["micro_batches"] * config["batch"]
        windows = random_windows(
            self._corpus, count=count, context=config["context"], seed=seed, step=step
        )
        own = np.split(windows, self.num_hosts)[self.index]
        delays = np.zeros(config["micro_batches"])
        if self.index == self.num_hosts - 1:
            random = np.random.default_rng((seed, step))
            delays = config["delay"] * random.lognormal(-0.5, 1, config["micro_batches"])
        return LateMicroBatches(np.split(own, config["micro_batches"]), delays)


@dataclasses.dataclass(frozen=True)
class LateMicroBatches(Sequence[np.ndarray]):
    """Micro-batches that arrive after a delay, as from a slow disk or a busy machine."""

    rows: list[np.ndarray]
    delays: np.ndarray  # seconds

    def __len__(self) -> int:
        """Return the number of micro-batches of a step."""
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Sleep, then return a micro-batch."""
        time.sleep(self.delays[index])
        return self.rows[index]


if __name__ == "__main__":
    serve(sys.argv[1], UnevenHost)
