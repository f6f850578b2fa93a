"""Training runs on emulated hosts: one process each, asked for one run after the other."""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynamiq_jax.cli import namespaces
from dynamiq_jax.cli.errors import CommandError
from dynamiq_jax.cli.joining import START_TIMEOUT
from dynamiq_jax.cli.processes import Workers, python_environment
from dynamiq_jax.cli.units import format_rate

_PORT = 9876  # of the coordinator; free in every fresh namespace
_HOST = Path(__file__).with_name("host.py")


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run recorded. Lists have an entry for each of `steps`."""

    setting: str
    seed: int
    rate: float | None  # bits a second of every link; None: unlimited
    steps: list[int]  # steps taken so far, from 0 to all
    seconds: list[float]  # that training took so far, evaluation and compilation left out
    checksums: list[int]  # CRC-32 of the parameters
    step_seconds: float  # median
    losses: dict[int, float]  # on the held-out text, by steps taken
    accuracies: dict[int, float]  # of the next token there


class Trainers:
    """Processes that train together; see `trainers`."""

    def __init__(self, network: namespaces.Network, workers: Workers, timeout: float):
        self._network, self._workers, self._timeout = network, workers, timeout

    def alone(self, seed: int, steps: int) -> float:
        """Seconds of a step of all hosts at once, each by itself: what is not the all-reduce."""
        self._ask({"do": "begin", "setting": None, "seed": seed}, "compiling")
        answers = self._ask({"do": "advance", "steps": steps}, "training without a network")
        return statistics.median(max(s) for s in zip(*(a["seconds"] for a in answers), strict=True))

    def run(
        self,
        setting: str,
        seed: int,
        *,
        rate: float | None,
        stops: list[int],
        evaluate_at: Collection[int],
        bytes_per_worker: int,
        advance: Callable[[str], None],
    ) -> Run:
        """Trains from the pre-trained weights of a seed.

        Args:
          setting: how to average gradients.
          seed: chooses weights, batches and rounding.
          rate: of every link, bits a second; None for no limit.
          stops: numbers of steps taken, from 0, at which the clock stops.
          evaluate_at: those of them at which to evaluate.
          bytes_per_worker: that each host sends in a step.
          advance: called with a text at every stop.

        Raises:
          CommandError: replicas differ, or a process ended, failed or did not answer in time.
        """
        self._network.set_rate(rate)
        at = "an unlimited link" if rate is None else format_rate(rate)
        doing = f"training with {setting} at {at}"
        # Five times the longest that the link alone takes: it may be slow and not stuck.
        link = 0.0 if rate is None else 5 * 8 * bytes_per_worker / rate
        request = {"do": "begin", "setting": setting, "seed": seed}
        self._ask(request, f"compiling {setting}", START_TIMEOUT + link)
        seconds = np.empty((self._network.num_hosts, 0))
        clock, checksums, losses, accuracies = [], [], {}, {}
        for before, stop in zip([0, *stops], stops, strict=False):
            if stop > before:
                request = {"do": "advance", "steps": stop - before}
                answers = self._ask(request, doing, (stop - before) * link)
                seconds = np.hstack([seconds, [a["seconds"] for a in answers]])
            clock.append(float(seconds.sum(axis=1).max()))  # of the slowest host
            checksums.append(self._checksum(doing))
            if stop in evaluate_at:
                answers = self._ask({"do": "evaluate"}, f"evaluating {setting}")
                losses[stop] = statistics.fmean(answer["loss"] for answer in answers)
                accuracies[stop] = statistics.fmean(answer["accuracy"] for answer in answers)
            advance(f"{setting}, seed {seed}, {at}")
        step_seconds = float(np.median(seconds.max(axis=0)))
        return Run(setting, seed, rate, stops, clock, checksums, step_seconds, losses, accuracies)

    def _checksum(self, doing: str) -> int:
        found = {answer["checksum"] for answer in self._ask({"do": "checksum"}, doing)}
        if len(found) > 1:
            raise CommandError(f"hosts hold different parameters, {doing}: a bug of the all-reduce")
        return found.pop()

    def _ask(
        self, request: dict[str, Any], doing: str, longer: float = 0.0
    ) -> list[dict[str, Any]]:
        return self._workers.ask(request, timeout=self._timeout + longer, doing=doing)


@contextlib.contextmanager
def trainers(
    num_hosts: int, folder: Path, timeout: float, config: dict[str, Any]
) -> Iterator[Trainers]:
    """Hosts and their processes, for the time of a `with` block.

    Args:
      num_hosts: how many.
      folder: has text.npz (int32 vectors `corpus` and `held_out`) and, for every seed,
        weights{seed}.npz (the leaves of the parameters in order).
      timeout: seconds without an answer, beyond what the link takes, after which all is ended.
      config: what the hosts need to know besides: model, batch, context, learning_rate, steps.
    """
    with namespaces.emulated(num_hosts) as network:
        common = config | {
            "parent": os.getpid(),
            "coordinator": f"{network.address(0)}:{_PORT}",
            "num_hosts": num_hosts,
            "folder": str(folder),
        }
        commands = [
            network.command(host, [sys.executable, str(_HOST), json.dumps(common | {"host": host})])
            for host in range(num_hosts)
        ]
        with Workers(commands, python_environment(num_hosts)) as workers:
            workers.ask({"do": "join"}, timeout=START_TIMEOUT, doing="joining")
            yield Trainers(network, workers, timeout)
            workers.ask({"do": "stop"}, timeout=timeout, doing="stopping")


def check_identical(runs: list[Run]) -> None:
    """Raises CommandError unless runs of a setting and seed went through the same parameters, bit
    for bit, on all links.
    """
    first: dict[tuple[str, int], Run] = {}
    for run in runs:
        other = first.setdefault((run.setting, run.seed), run)
        if run.checksums != other.checksums:
            apart = next(
                step
                for step, mine, its in zip(run.steps, run.checksums, other.checksums, strict=True)
                if mine != its
            )
            raise CommandError(
                f"{run.setting}, seed {run.seed}: parameters after {apart} steps depend on the "
                "link. Training is to be the same bit for bit: a bug of the all-reduce."
            )
