"""The process of one emulated host: trains with the others, in the steps of the example.

`run.py` is the other end, `dynamiq_jax/cli/worker.py` has the loop that reads requests.
"""

import sys
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.cli import joining, measure
from dynamiq_jax.cli.settings import parse_setting
from dynamiq_jax.cli.worker import serve

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from small_lm.data import all_windows, random_windows
from small_lm.model import ModelConfig
from small_lm.training import data_parallel_step, make_optimizer, new_model


class Host:
    """What can be asked of a host, by the name of the method."""

    def __init__(self, config: dict[str, Any]):
        self._config = config
        self._steps: dict[str | None, Any] = {}  # compiled, by setting

    def join(self) -> dict[str, Any]:
        """Joins the others and reads the text."""
        config = self._config
        jax.config.update("jax_num_cpu_devices", 1)
        joining.join(config["coordinator"], config["num_hosts"], config["host"])
        self._everyone, self._alone = _mesh(jax.devices()), _mesh(jax.local_devices())
        text = np.load(Path(config["folder"]) / "text.npz")
        self._corpus = text["corpus"]
        held_out = all_windows(
            text["held_out"], context=config["context"], multiple_of=config["num_hosts"]
        )
        self._share = held_out[config["host"] :: config["num_hosts"]]
        self._structure, self._params = new_model(ModelConfig(**config["model"]))
        self._optimizer = make_optimizer(config["learning_rate"], config["steps"])
        self._evaluate = jax.jit(_evaluation_of(self._structure))
        return {"device": jax.devices()[0].device_kind}

    def begin(self, setting: str | None, seed: int) -> dict[str, Any]:
        """Takes one step to compile and to warm up, then goes back to the pre-trained weights.

        Args:
          setting: how to average gradients; None to train alone, without any network.
          seed: chooses weights, batches and rounding.
        """
        config = self._config
        mesh = self._alone if setting is None else self._everyone
        if setting not in self._steps:
            how = {"method": None}
            if setting is not None:
                parsed = parse_setting(setting)
                how = {"method": parsed.method, "topology": parsed.topology}
            self._steps[setting] = data_parallel_step(self._structure, self._optimizer, mesh, **how)
        everywhere = NamedSharding(mesh, P())

        def start() -> Any:
            with np.load(Path(config["folder"]) / f"weights{seed}.npz") as file:
                leaves = [file[name] for name in file.files]
            params = jax.tree.unflatten(jax.tree.structure(self._params), leaves)
            params = jax.tree.map(
                lambda leaf: jax.make_array_from_process_local_data(everywhere, leaf), params
            )
            return params, jax.jit(self._optimizer.init, out_shardings=everywhere)(params)

        key = jax.jit(
            lambda step: jax.random.fold_in(jax.random.key(seed), step), out_shardings=everywhere
        )
        self._batches = [
            (self._tokens(mesh, seed, step), key(np.uint32(step)))
            for step in range(config["steps"])
        ]
        self._step, self._taken = self._steps[setting], 0
        jax.block_until_ready(self._step(*start(), *self._batches[0]))
        self._state = start()
        return {}

    def advance(self, steps: int) -> dict[str, Any]:
        """Trains on, and says how long every step took until its result was there."""
        batches = self._batches[self._taken : self._taken + steps]
        seconds = []
        measure.barrier()
        for tokens, key in batches:
            start = time.perf_counter()
            params, state, _ = jax.block_until_ready(self._step(*self._state, tokens, key))
            self._state = params, state
            seconds.append(time.perf_counter() - start)
        self._taken += steps
        return {"seconds": seconds}

    def checksum(self) -> dict[str, Any]:
        """CRC-32 of this host's copy of the parameters."""
        checksum = 0
        for leaf in jax.tree.leaves(self._own_params()):
            checksum = zlib.crc32(np.asarray(leaf), checksum)
        return {"checksum": checksum}

    def evaluate(self) -> dict[str, Any]:
        """Loss and accuracy on this host's share of the held-out text; no network is involved."""
        loss, accuracy = self._evaluate(self._own_params(), self._share)
        return {"loss": float(loss), "accuracy": float(accuracy)}

    def stop(self) -> dict[str, Any]:
        """Leaves the others in order, after which it may be ended at any time."""
        jax.distributed.shutdown()
        return {}

    def _own_params(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), self._state[0])

    def _tokens(self, mesh: Mesh, seed: int, step: int) -> jax.Array:
        """This host's part of a batch, int32 [hosts * batch, context + 1]: the same windows for
        every setting.
        """
        config = self._config
        windows = random_windows(
            self._corpus,
            count=config["num_hosts"] * config["batch"],
            context=config["context"],
            seed=seed,
            step=step,
        )
        own = windows[config["host"] * config["batch"] :][: config["batch"]]
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own)


def _mesh(devices: list[jax.Device]) -> Mesh:
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def _evaluation_of(structure: nnx.GraphDef) -> Any:
    """A function of parameters and tokens: cross entropy (nats a token) and next-token accuracy."""

    def evaluate(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        model, targets = nnx.merge(structure, params), tokens[:, 1:]
        logits = model(tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
        return loss, jnp.mean(jnp.argmax(logits, axis=-1) == targets)

    return evaluate


if __name__ == "__main__":
    serve(sys.argv[1], Host)
