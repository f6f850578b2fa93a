"""Final loss of islands, beside local SGD in one job, also while one is killed again and again.

    python -m benchmarks.islands.rounds

Islands are processes of this machine. All runs start from the same weights and see the same
batches. A second table has the loss of local SGD against its bytes, with 100 local steps and sparse
changes too: the point of SparseLoCo (arXiv 2508.15706).
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.harness import files
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.islands.rounds_host import islands_of
from benchmarks.training.every_run import batches_of
from benchmarks.training.local_sgd import local
from benchmarks.training.small_lm.corpora import Corpora, all_windows, load_corpora
from benchmarks.training.small_lm.pretraining import Params, adamw, evaluator
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax.methods import BlockInt, ErrorFeedback, resolve_method
from dynamiq_jax.training import LocalSGD

KILLED = 2  # index of the island that is killed


def two_bits_of_blocks(bits: float) -> ErrorFeedback:
    """Return chunked top-k, a method of research, with values of 2 bits, in error feedback."""
    blocks: Any = resolve_method("topk_chunked")
    inner = BlockInt(code_bits=2, block=256)
    return ErrorFeedback(inner=dataclasses.replace(blocks, bits=bits, inner=inner))


def methods() -> dict[str, Any]:
    """Return the methods of the second table, by name."""
    return {
        "exact": "exact",
        "4 bits": "dynamiq:4",
        "3 bits, error feedback": "ef+dynamiq:3",
        "top-k of 2 bits, half of the blocks": two_bits_of_blocks(1.1),
        "top-k of 2 bits, a tenth of the blocks": two_bits_of_blocks(0.27),
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workers: int = 3
    every: int = 20  # local steps of a round
    long: int = 100  # local steps of a round in the other half of the second table
    steps: int = 300
    batch: int = 2  # windows of each island and step
    context: int = 64
    width: int = 128
    learning_rate: float = 1e-3
    pretrain_steps: int = 120
    kills: int = 10
    deadline: float = 60.0
    seed: int = 0
    save: bool = True  # write the result to benchmarks/results/islands.json


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything that all runs have in common."""

    config: Config
    corpora: Corpora
    structure: Any
    params: Params
    evaluate: Callable[[Params], float]

    def local_sgd(self, method: Any, every: int) -> dict[str, Any]:
        """Train in one job; return the final loss and the bytes that a worker sends."""
        config = self.config
        mesh = jax.make_mesh((config.workers,), ("data",), axis_types=(AxisType.Auto,))
        outer = LocalSGD(axis_name="data", every=every, method=method, outer=optax.sgd(1.0))
        training = local(self.structure, mesh, adamw(config.learning_rate), outer)
        carry = training.init(self.params)
        for tokens in batches_of(self.corpora.reference, config, config.seed):
            carry = training.step(carry, tokens)
        (report,) = outer.wire_report(self.params, config.workers)
        sent = report.bytes_per_worker * (config.steps // every)
        return {"loss": self.evaluate(training.params_of(carry)), "bytes": sent}

    def islands(self, method: str, kills: int, *, keeps_optimizer: bool = False) -> dict[str, Any]:
        """Train islands, one of which is killed in the middle of some rounds.

        When it starts again, its optimizer starts anew too, unless it keeps its state in a file.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "config.json")
            np.savez(f"{folder}/params.npz", *jax.device_get(jax.tree.leaves(self.params)))
            config = dataclasses.asdict(self.config) | {
                "folder": f"{folder}/run",
                "params": f"{folder}/params.npz",
                "method": method,
                "keeps_optimizer": keeps_optimizer,
            }
            os.mkdir(config["folder"])
            path.write_text(json.dumps(config))
            jobs = [_start(path, index) for index in range(self.config.workers)]
            killed = 0
            while killed < kills and jobs[0].poll() is None:
                last = _last_round(config["folder"])
                _wait_for_round(config["folder"], last, jobs[0])
                time.sleep(0.5)  # in the middle of local steps
                jobs[KILLED].kill()
                jobs[KILLED].wait()
                killed += 1
                jobs[KILLED] = _start(path, KILLED)
                _wait_for_join(config["folder"], jobs)
            codes = [job.wait() for job in jobs]
            return {"kills": killed, "exit_codes": codes, **self._outcome(config, path)}

    def _outcome(self, config: dict[str, Any], path: Path) -> dict[str, Any]:
        observer = islands_of(config, "observer")
        state = observer.join(self.params)
        times = [json.loads(line) for line in Path(f"{path}.times").read_text().splitlines()]
        others = [row for row in times if row["island"] != "abcdefgh"[KILLED]]
        decisions = sorted(Path(config["folder"], "decision").iterdir())
        came = [len(json.loads(file.read_text())["members"]) for file in decisions]
        # A decision of a round is of one reference. Changes of another one would be beside it.
        references = [len(list(f.iterdir())) for f in Path(config["folder"], "change").iterdir()]
        changes = [f for f in Path(config["folder"], "change").rglob("*") if f.is_file()]
        return {
            "loss": self.evaluate(state.reference),
            "rounds": state.round,
            "came": came,
            "references_of_a_round": max(references),
            "longest_exchange_of_others": max(row["seconds"] for row in others),
            "rounds_missed_by_others": sum(row["after"] != row["round"] + 1 for row in others),
            "message_bytes": changes[0].stat().st_size,
        }


def _start(path: Path, index: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(path.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "benchmarks.islands.rounds_host", str(path), str(index)]
    return subprocess.Popen(command, env=environment)


def _last_round(folder: str) -> int:
    """Return the last round that the killed island has announced; -1 before the first."""
    here = Path(folder, "here")
    name = "abcdefgh"[KILLED]
    return max((int(file.parent.name) for file in here.rglob(name)), default=-1)


def _wait_for_round(folder: str, last: int, job: subprocess.Popen[bytes]) -> None:
    """Wait until the killed island announces a round after the last one."""
    while _last_round(folder) <= last and job.poll() is None:
        time.sleep(0.05)


def _wait_for_join(folder: str, jobs: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the round in which an island was killed has been decided."""
    number = _last_round(folder)
    while not Path(folder, f"decision/{number:08}").exists() and jobs[0].poll() is None:
        time.sleep(0.05)


def plot(results: dict[str, Any]) -> Figure:
    """Draw the loss against the bytes that a worker sends."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    rows = {name: row for name, row in results.items() if "@" in name}
    for number, every in enumerate(dict.fromkeys(name.partition("@")[2] for name in rows)):
        points = [(row["bytes"], row["loss"]) for n, row in rows.items() if n.endswith(f"@{every}")]
        axis.plot(*zip(*points, strict=True), marker="o", label=f"{every} local steps")
        for name, row in rows.items():
            if name.endswith(f"@{every}") and number == 0:
                at = row["bytes"], row["loss"]
                axis.annotate(name.partition("@")[0], at, fontsize="x-small", rotation=20)
    axis.set(xscale="log", xlabel="sent by each worker (bytes)", ylabel="evaluation loss")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


@benchmark("islands")
def main(config: Config) -> Iterator[Report]:
    """Train with all runs; report after each, since all of them take long."""
    jax.config.update("jax_num_cpu_devices", config.workers)
    console = Console()
    corpora = load_corpora()
    with console.status("Pre-training"):
        structure, params = pretrained(corpora, steps=config.pretrain_steps, width=config.width)
    windows = all_windows(corpora.held_out, context=config.context)[:512]
    task = Task(config, corpora, structure, params, evaluator(structure, windows))
    earlier = files.earlier_results(
        files.path_of("islands"), dataclasses.asdict(config), but=("save",)
    )
    # Runs that are there are not run again.
    results: dict[str, Any] = earlier or {
        "parameters": sum(x.size for x in jax.tree.leaves(params))
    }
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "one job": lambda: task.local_sgd("dynamiq:4", config.every),
        "islands": lambda: task.islands("dynamiq:4", 0),
        "islands, killed": lambda: task.islands("dynamiq:4", config.kills),
        "islands, killed, inner optimizer kept": lambda: task.islands(
            "dynamiq:4", config.kills, keeps_optimizer=True
        ),
    }
    for every in (config.every, config.long):
        for name, method in methods().items():
            runs[f"{name}@{every}"] = lambda m=method, e=every: task.local_sgd(m, e)
    for name, train in runs.items():
        if name in results:
            continue
        start = time.monotonic()
        results[name] = {**train(), "seconds": time.monotonic() - start}
        console.print(name, results[name])
        yield Report(results=results, draw=lambda: plot(results))


if __name__ == "__main__":
    run(main, __doc__)
