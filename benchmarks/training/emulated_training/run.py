"""Runs of a training on emulated hosts, which are told when to train and when to stop."""

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulation.hosts import Hosts, joined_hosts, link_patience
from benchmarks.training.emulated_training.rounds import parse_rounds
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_rate
from dynamiq_jax._measurement.devices import START_TIMEOUT


@dataclasses.dataclass
class EmulatedRun:
    """Record of one run. Dictionaries are by the number of steps taken before."""

    setting: str
    seed: int
    rate: float | None  # bits a second of every link; None: unlimited
    host_seconds: list[tuple[float, ...]] = dataclasses.field(default_factory=list)  # of each step
    checksums: dict[int, int] = dataclasses.field(default_factory=dict)  # CRC-32 of the parameters
    losses: dict[int, float] = dataclasses.field(default_factory=dict)  # on the held-out text
    accuracies: dict[int, float] = dataclasses.field(default_factory=dict)  # of the next token

    @property
    def step_seconds(self) -> float:
        """Median over steps, of the slowest host. With local SGD, whose steps differ, the mean."""
        average = np.mean if parse_rounds(self.setting).every else np.median
        return float(average(np.max(self.host_seconds, axis=1)))

    def clock(self, steps: int) -> float:
        """Return the seconds of the first steps, on the slowest host and without evaluation."""
        return float(np.sum(self.host_seconds[:steps], axis=0).max()) if steps else 0.0


class Trainers:
    """Hosts that train together; see `trainers`."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts

    def alone(self, seed: int, steps: int) -> float:
        """Return the seconds of a step without the all-reduce, on all hosts at once."""
        request = {"do": "begin", "setting": None, "seed": seed}
        self._hosts.ask(request, "compiling", patience=START_TIMEOUT)
        request = {"do": "advance", "setting": None, "steps": steps}
        answers = self._hosts.ask(request, "training without a network")
        return float(np.median(np.max([answer["seconds"] for answer in answers], axis=0)))

    def train(
        self,
        settings: Mapping[str, int],
        seed: int,
        *,
        rate: float | None,
        stops: Sequence[int],
        evaluate_at: Collection[int],
        advance: Callable[[str], None],
    ) -> list[EmulatedRun]:
        """Train with every setting, from the pre-trained weights of a seed.

        Settings take turns, a few steps each, so that a change of the machine's load meets all.

        Args:
          settings: how to average gradients, and the bytes that each host sends in a step.
          seed: chooses weights, batches and rounding.
          rate: of every link, bits a second; None for no limit.
          stops: numbers of steps taken, from 0, at which the clock stops.
          evaluate_at: those of them at which to evaluate.
          advance: called with a text after every turn.

        Raises:
          CommandError: replicas differ, or a process ended, failed or did not answer in time.
        """
        self._hosts.network.set_rate(rate)
        at = "an unlimited link" if rate is None else format_rate(rate)
        link = link_patience(max(settings.values()), rate)
        runs = [EmulatedRun(setting, seed, rate) for setting in settings]
        for run in runs:
            request = {"do": "begin", "setting": run.setting, "seed": seed}
            self._hosts.ask(request, f"compiling {run.setting}", patience=START_TIMEOUT + link)
        for before, stop in itertools.pairwise([0, *stops]):
            for run in runs:
                doing = f"training with {run.setting} at {at}"
                if stop > before:
                    request = {"do": "advance", "setting": run.setting, "steps": stop - before}
                    answers = self._hosts.ask(request, doing, patience=(stop - before) * link)
                    run.host_seconds.extend(zip(*(a["seconds"] for a in answers), strict=True))
                run.checksums[stop] = self._checksum(run.setting, doing)
                if stop in evaluate_at:
                    self._evaluate(run, stop)
                advance(f"{run.setting}, seed {seed}, {at}")
        return runs

    def _evaluate(self, run: EmulatedRun, stop: int) -> None:
        request = {"do": "evaluate", "setting": run.setting}
        answers = self._hosts.ask(request, f"evaluating {run.setting}")
        run.losses[stop] = statistics.fmean(answer["loss"] for answer in answers)
        run.accuracies[stop] = statistics.fmean(answer["accuracy"] for answer in answers)

    def _checksum(self, setting: str, doing: str) -> int:
        answers = self._hosts.ask({"do": "checksum", "setting": setting}, doing)
        found = {answer["checksum"] for answer in answers}
        if len(found) > 1:
            raise CommandError(f"hosts hold different parameters, {doing}: a bug of the all-reduce")
        return found.pop()


@contextlib.contextmanager
def trainers(
    num_hosts: int, folder: Path, timeout: float, config: Mapping[str, Any]
) -> Iterator[Trainers]:
    """Emulate hosts that train, for the time of a `with` block.

    Args:
      num_hosts: number of hosts.
      folder: has text.npz (int32 `corpus` [tokens] and `held_out` [windows, context + 1], as many
        for each host) and, for every seed, weights{seed}.npz (leaves of the parameters in order).
      timeout: seconds without an answer, beyond what the link takes, after which all is ended.
      config: what the hosts have to know besides: model, batch, context, learning_rate, steps.
    """
    module, config = "benchmarks.training.emulated_training.host", {**config, "folder": str(folder)}
    with joined_hosts(num_hosts, module, config, timeout=timeout) as hosts:
        yield Trainers(hosts)


def check_identical(runs: Sequence[EmulatedRun]) -> None:
    """Raise CommandError unless runs of a setting and seed went through the same parameters, bit
    for bit, on all links.
    """
    first: dict[tuple[str, int], EmulatedRun] = {}
    for run in runs:
        other = first.setdefault((run.setting, run.seed), run)
        apart = [step for step, bits in run.checksums.items() if other.checksums[step] != bits]
        if apart:
            raise CommandError(
                f"{run.setting}, seed {run.seed}: parameters after {apart[0]} steps depend on the "
                "link. Training is to be the same bit for bit: a bug of the all-reduce."
            )
