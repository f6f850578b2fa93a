"""Time to a loss of islands over slow links, beside all-reduces, from measured parts.

    python -m benchmarks.islands.links

Losses are those of a small language model on three workers, trained in one process. Times are of
one worker's local step alone, and of an exchange or all-reduce between hosts that are emulated on
this machine (root and iproute2), each with a link of its own. Islands exchange over a store on a
fourth host, a small HTTP server with the same link.

Targets are losses at which the run with exact gradients has made 80 and 95 % of its way. Between
evaluations a loss is taken to fall on a straight line.
"""

import dataclasses
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import dynamiq_jax as dq
from benchmarks.emulation import namespaces
from benchmarks.emulation.network import NetworkRun
from benchmarks.emulation.processes import Processes
from benchmarks.emulation.python_processes import (
    python_command,
    python_environment,
    threads_of_each,
)
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.timing import median_seconds
from benchmarks.training.emulated_training.target import reached, target_loss
from benchmarks.training.every_run import batches_of
from benchmarks.training.small_lm.corpora import all_windows, load_corpora
from benchmarks.training.small_lm.pretraining import adamw, loss_of
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax import islands
from dynamiq_jax._console.units import parse_rate
from dynamiq_jax._measurement.settings import PSUM, parse_settings

Batch = Any
METHOD, RING = "dynamiq:4", "dynamiq:4:ring"
FRACTIONS = 0.8, 0.95
# What each run waits for: a setting of an all-reduce or "islands", and whether in every step.
RUNS = {
    "float32 in every step": (PSUM, True),
    "4 bits in every step": (RING, True),
    "local SGD in one job, 4 bits": (RING, False),
    "islands, 4 bits": ("islands", False),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rates: tuple[str, ...] = ("10mbit", "100mbit")
    workers: int = 3
    every: int = 20  # local steps of a round
    steps: int = 300
    batch: int = 2  # windows of each worker and step
    context: int = 64
    width: int = 128
    learning_rate: float = 1e-3
    pretrain_steps: int = 120
    repeats: int = 3  # timed exchanges
    seed: int = 0
    save: bool = True  # write the result to benchmarks/results/islands_links.json


class Training:
    """The runs, all from the same weights and with the same batches."""

    def __init__(self, config: Config):
        self.config, self.corpora = config, load_corpora()
        structure, self.params = pretrained(
            self.corpora, steps=config.pretrain_steps, width=config.width
        )
        self.loss = jax.jit(loss_of(structure))
        held_out = all_windows(self.corpora.held_out, context=config.context)
        self.held_out = jnp.asarray(held_out[:256])
        self.optimizer = adamw(config.learning_rate)
        self.size = sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def losses(self, name: str) -> list[float]:
        """Return the loss of a run after every round."""
        setting, in_every_step = RUNS[name]
        compiled = jax.jit(
            jax.vmap(
                lambda own, batch, key: self._step(
                    own, batch, key, setting if in_every_step else None
                ),
                axis_name="data",
                in_axes=(0, 0, None),
            )
        )
        replicate = jax.vmap(lambda _, tree: tree, in_axes=(0, None))
        workers = jnp.arange(self.config.workers)
        reference = self.params
        own = replicate(workers, (reference, self.optimizer.init(reference)))
        found = [float(self.loss(reference, self.held_out))]
        for number, tokens in enumerate(self._batches()):
            key = jax.random.key(number)
            own = compiled(own, tokens, key)
            if (number + 1) % self.config.every:
                continue
            if in_every_step:
                reference = jax.tree.map(lambda leaf: leaf[0], own[0])
            else:
                reference = self._round(reference, own[0], key, setting)
                own = replicate(workers, reference), own[1]
            found.append(float(self.loss(reference, self.held_out)))
        return found

    def seconds(self) -> float:
        """Return the median time of a local step of one worker alone."""
        step = jax.jit(lambda own, batch: self._step(own, batch, None, None))
        own = self.params, self.optimizer.init(self.params)
        first, second = itertools.islice(self._batches(), 2)
        own = jax.block_until_ready(step(own, first[0]))
        return median_seconds(step, own, second[0])

    def _step(self, own: Any, batch: Batch, key: Any, setting: str | None) -> Any:
        params, state = own
        grads = jax.grad(self.loss)(params, batch)
        if setting == PSUM:
            grads = jax.lax.pmean(grads, "data")
        elif setting:
            grads = dq.pmean(grads, "data", key=key, method=dq.Compression(METHOD, "ring"))
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def _round(self, reference: Any, params: Any, key: Any, setting: str) -> Any:
        """Take the outer step of a round: the plain mean of the changes."""
        changes = jax.tree.map(lambda before, now: before - now, reference, params)
        if setting == "islands":
            keys = jax.random.split(key, self.config.workers)
            own = [jax.tree.map(operator.itemgetter(i), changes) for i in range(len(keys))]
            messages = [
                islands.encode(change, key=each, method=METHOD)
                for change, each in zip(own, keys, strict=True)
            ]
            shares = [1 / self.config.workers] * self.config.workers
            mean = islands.decode(*messages, weights=shares, like=reference)
        else:
            mean = jax.tree.map(lambda leaf: leaf[0], self._all_reduced(changes, key))
        return jax.tree.map(jnp.subtract, reference, mean)

    def _all_reduced(self, changes: Any, key: Any) -> Any:
        def mean(own: Any) -> Any:
            return dq.pmean(own, "data", key=key, method=dq.Compression(METHOD, "ring"))

        return jax.jit(jax.vmap(mean, axis_name="data"))(changes)

    def _batches(self) -> Iterator[jax.Array]:
        return batches_of(self.corpora.reference, self.config, self.config.seed)


def exchanges(size: int, config: Config, done: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the times of exchanges of islands, for each rate: the slowest island counts."""
    count, seconds = config.workers + 1, {}
    with namespaces.emulated(count) as network:
        fields = {"size": size, "method": METHOD, "store": network.address(0)}
        fields |= {"parent": os.getpid(), "num_hosts": count}
        module = "benchmarks.islands.links_host"
        commands = [
            network.command(host, python_command(module, json.dumps(fields | {"host": host})))
            for host in range(count)
        ]
        with Processes(commands, python_environment(count)) as processes:
            for request in ("join", "begin", "exchange"):  # the last one compiles
                processes.ask({"do": request}, timeout=300, doing=request)
            for rate in config.rates:
                network.set_rate(parse_rate(rate, "--rates"))
                seconds[rate] = []
                for _ in range(config.repeats):
                    answers = processes.ask({"do": "exchange"}, timeout=300, doing="an exchange")
                    seconds[rate].append(max(answer["seconds"] for answer in answers))
                done(f"islands at {rate}")
    return seconds


def all_reduces(size: int, config: Config, done: Callable[[str], None]) -> dict[str, Any]:
    """Return the times of all-reduces, for each setting and rate."""
    network = NetworkRun(
        parse_settings((PSUM, RING)),
        config.workers,
        size=size,
        repeats=config.repeats,
        seed=config.seed,
        timeout=300,
    )
    _, rows = network.measure([parse_rate(rate, "--rates") for rate in config.rates], done)
    return {
        setting: {
            rate: row["repeats"]
            for rate in config.rates
            for row in rows
            if row["setting"] == setting and row["rate"] == parse_rate(rate, "--rates")
        }
        for setting in (PSUM, RING)
    }


def times(results: dict[str, Any], config: Config) -> list[dict[str, Any]]:
    """Combine losses and times: steps and seconds to each target; None if it is not reached."""
    exact, rows = results["losses"]["float32 in every step"], []
    for fraction, (name, (setting, in_every_step)) in itertools.product(FRACTIONS, RUNS.items()):
        losses = results["losses"][name]
        at = [number * config.every for number in range(len(losses))]
        steps = reached(at, losses, target_loss(exact, fraction))
        row: dict[str, Any] = {"run": name, "fraction": fraction, "steps": steps, "seconds": {}}
        for rate in config.rates:
            transfer = median(results["transfers"][setting][rate])
            step = results["computing"] + transfer / (1 if in_every_step else config.every)
            row["seconds"][rate] = None if steps is None else steps * step
        rows.append(row)
    return rows


@benchmark("islands_links")
def main(config: Config) -> Report:
    """Measure all parts, and combine them."""
    namespaces.check_possible()
    console, training = Console(), Training(config)
    results: dict[str, Any] = {"parameters": training.size, "losses": {}}
    results["threads"] = threads_of_each(config.workers + 1)  # and a store
    results["transfers"] = {
        "islands": exchanges(training.size, config, console.print),
        **all_reduces(training.size, config, console.print),
    }
    results["computing"] = training.seconds()
    console.print(results)
    for name in RUNS:
        results["losses"][name] = training.losses(name)
        console.print(name, results["losses"][name])
    results["rows"] = times(results, config)
    return Report(results=results, shown=[results["rows"]])


if __name__ == "__main__":
    run(main, __doc__)
