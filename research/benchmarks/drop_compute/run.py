"""Runs of two real processes with and without a compute threshold."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.emulation.processes import Processes
from benchmarks.emulation.python_processes import python_command, python_environment
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._measurement.devices import START_TIMEOUT

HOSTS = 2
_TIMEOUT = 300.0  # seconds without an answer, compilation included


def train(
    training: dict[str, Any],
    *,
    seeds: Sequence[int],
    stops: Sequence[int],
    advance: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Train with and without a threshold, for each seed.

    Args:
      training: configuration of the hosts; see `host.UnevenHost`.
      seeds: seeds of batches and delays.
      stops: numbers of steps after which the model is evaluated; the first is 0.
      advance: called after each part of a run.

    Returns:
      A record of each run. Seconds do not include compilation and evaluation.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = training | {"parent": os.getpid(), "coordinator": address, "num_hosts": HOSTS}
    module = "research.benchmarks.drop_compute.host"
    commands = [python_command(module, json.dumps(common | {"host": h})) for h in range(HOSTS)]
    with Processes(commands, python_environment(HOSTS)) as processes:

        def ask(do: str, timeout: float = _TIMEOUT, **arguments: Any) -> list[dict[str, Any]]:
            return processes.ask({"do": do, **arguments}, timeout=timeout, doing=do)

        ask("join", START_TIMEOUT)
        runs = []
        for seed in seeds:
            for threshold in (False, True):
                ask("begin", threshold=threshold, seed=seed)
                runs.append(_run(ask, stops, advance) | {"seed": seed, "threshold": threshold})
                if threshold:
                    runs[-1]["chosen"] = ask("chosen")[0]
        ask("stop")
    return runs


def _run(
    ask: Callable[..., list[dict[str, Any]]], stops: Sequence[int], advance: Callable[[str], None]
) -> dict[str, Any]:
    seconds: list[float] = []
    dropped: list[float] = []
    losses: list[float] = []
    for steps in np.diff(stops, prepend=0).tolist():
        if steps:
            found = ask("advance", steps=steps)
            # The step ends for all with the all-reduce; the last one to see it counts.
            seconds += np.max([answer["seconds"] for answer in found], axis=0).tolist()
            dropped += found[0]["dropped"]
        evaluated = ask("evaluate")
        if len({answer["checksum"] for answer in evaluated}) > 1:
            raise CommandError(f"processes hold other parameters after {len(seconds)} steps.")
        losses.append(evaluated[0]["loss"])
        advance("")
    return {"seconds": seconds, "dropped": dropped, "stops": list(stops), "losses": losses}


def compare(runs: Sequence[dict[str, Any]], calibrating: int) -> list[dict[str, Any]]:
    """Compare the two runs of each seed.

    Args:
      runs: of `train`.
      calibrating: first steps, in which neither has a threshold.
    """
    rows = []
    for seed in dict.fromkeys(run["seed"] for run in runs):
        plain, limited = sorted(
            (run for run in runs if run["seed"] == seed), key=lambda run: run["threshold"]
        )
        clocks = [np.concatenate([[0.0], np.cumsum(run["seconds"])]) for run in (plain, limited)]
        equal = float(min(clock[-1] for clock in clocks))
        losses = [
            float(np.interp(equal, clock[run["stops"]], run["losses"]))
            for clock, run in zip(clocks, (plain, limited), strict=True)
        ]
        steps = [float(np.mean(run["seconds"][calibrating:])) for run in (plain, limited)]
        drop_rate = float(np.mean(limited["dropped"][calibrating:]))
        rows.append(
            {
                "seed": seed,
                "threshold": limited["chosen"]["threshold"],
                "step_seconds_before": steps[0],
                "step_seconds": steps[1],
                "drop_rate": drop_rate,
                "speedup": (1 - drop_rate) * steps[0] / steps[1],
                "predicted_speedup": limited["chosen"]["speedup"],
                "predicted_step_seconds": limited["chosen"]["step_seconds"],
                "equal_seconds": equal,
                "loss_before": losses[0],
                "loss": losses[1],
                "final_loss_before": plain["losses"][-1],
                "final_loss": limited["losses"][-1],
            }
        )
    return rows
