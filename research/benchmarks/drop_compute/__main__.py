"""Gain of a compute threshold: simulated for up to 200 workers, and measured with two processes of
which one is late.

    python -m research.benchmarks.drop_compute

The simulation draws latencies of micro-batches, chooses a threshold on half of the steps, and
replays the other half. Nothing is trained in it.

The two processes train a small language model from the same pre-trained weights on the same
batches. The second one sleeps a lognormal time before each of its micro-batches, the same times in
the run with a threshold and in the one without. The clock counts steps, without compilation and
evaluation. It shows times of this machine: run it while nothing else does.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from rich.table import Table

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.small_lm.corpora import all_windows, load_corpora
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import pretrain
from benchmarks.training.small_lm.training import new_model
from dynamiq_jax._console import options, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_seconds
from dynamiq_research import Calibration
from dynamiq_research.drop_compute.prediction import (
    MadeUp,
    Noise,
    Rule,
    predict,
    split_in_half,
    sweep,
)
from research.benchmarks.drop_compute.figure import draw
from research.benchmarks.drop_compute.run import compare, train


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workers: tuple[int, ...] = (8, 64, 200)
    """Simulated workers. The last number is that of the figure."""

    simulated_steps: int = 200
    """Half of them choose the threshold."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Of batches and delays of the processes; empty to simulate only."""

    steps: int = 80
    """Steps of a run of the processes."""

    calibration_steps: int = 20
    """First steps without a threshold."""

    micro_batches: int = 8
    """Micro-batches of each process and step."""

    batch: int = 2
    """Windows of a micro-batch."""

    context: int = 64
    """Tokens of a window."""

    delay: float = 0.03
    """Mean seconds that the second process sleeps before a micro-batch."""

    max_drop: float = 0.1
    """Share of micro-batches that may be dropped."""

    method: str = "dynamiq:5"
    """How gradients are averaged."""

    learning_rate: float = 1e-3
    """After a warm-up over ten steps."""

    eval_every: int = 8
    """Steps between evaluations."""

    pretrain_steps: int = 150
    """Steps of pre-training, without compression."""

    save: bool = True
    """Write research/benchmarks/results/drop_compute.json and .png."""

    def training(self, folder: Path, model: ModelConfig) -> dict[str, Any]:
        """Return the configuration of the processes."""
        calibration = Calibration(skip=2, steps=self.calibration_steps - 2, max_drop=self.max_drop)
        shared = ("micro_batches", "batch", "context", "delay", "method", "learning_rate")
        return {name: getattr(self, name) for name in shared} | {
            "folder": str(folder),
            "model": dataclasses.asdict(model),
            "calibration": dataclasses.asdict(calibration),
            "warm_up": 10,
        }


def simulate(config: Config) -> dict[str, Any]:
    """Predict the gain for every distribution and number of workers."""
    rows: list[dict[str, Any]] = []
    swept: dict[str, Any] = {}
    rule = Rule(max_drop=config.max_drop)
    for noise in get_args(Noise):
        for workers in config.workers:
            made_up = MadeUp(
                noise=noise, workers=workers, micro_batches=12, mean=0.45, deviation=0.3, rest=0.3
            )
            latencies = made_up.draw(config.simulated_steps, seed=0)
            found = dataclasses.asdict(predict(latencies, rule))
            rows.append({"noise": noise, "workers": workers, **found})
            if (noise, workers) == ("normal", config.workers[-1]):
                _, held_out = split_in_half(latencies)
                swept = {
                    "sweep": sweep(held_out, rule),
                    "sweep_threshold": found["chosen"]["threshold"],
                }
    of_ten = MadeUp(
        noise="lognormal", workers=10, micro_batches=8, mean=0.45, deviation=0.4, rest=0.3
    )
    latencies = of_ten.draw(config.simulated_steps, seed=1)
    threshold = predict(latencies, rule).chosen.threshold
    step = {"times": latencies.times[-1].tolist(), "threshold": threshold}
    return {"simulated": rows, **swept, "step": step}


def measure(config: Config) -> list[dict[str, Any]]:
    """Train two processes with and without a threshold."""
    jax.config.update("jax_platforms", "cpu")  # as the processes have it
    console = tables.console()
    corpora = load_corpora()
    model = ModelConfig(corpora.vocabulary)
    stops = [*range(0, config.steps, config.eval_every), config.steps]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = all_windows(corpora.held_out, context=config.context)
        np.savez(folder / "text.npz", corpus=corpora.reference, held_out=held_out)
        structure, params = new_model(model)
        with tables.progress(console, "pre-training", config.pretrain_steps) as advance:
            params = pretrain(
                structure,
                params,
                corpora.source_code,
                steps=config.pretrain_steps,
                batch=8,
                context=config.context,
                on_step=lambda step, loss: advance(""),
            )
        np.savez(folder / "weights.npz", *map(np.asarray, jax.tree.leaves(params)))
        count = 2 * len(config.seeds) * len(stops)
        with tables.progress(console, "training", count) as advance:
            return train(
                config.training(folder, model), seeds=config.seeds, stops=stops, advance=advance
            )


def as_tables(results: dict[str, Any]) -> list[Table]:
    """Make a table of the simulation, and one of the processes."""
    simulated = (
        Column("latencies", "noise"),
        Column("workers", "workers"),
        Column("dropped", ("held_out", "drop_rate"), "{:.1%}"),
        Column("speed-up", ("held_out", "speedup"), "{:.3f}x"),
        Column("law", "law", "{:.3f}x"),
        Column("if cut off", ("cut", "speedup"), "{:.3f}x"),
        Column("law", "cut_law", "{:.3f}x"),
    )
    measured = (
        Column("seed", lambda row: str(row["seed"])),
        Column("step", lambda row: format_seconds(row["step_seconds_before"])),
        Column("with a threshold", lambda row: format_seconds(row["step_seconds"])),
        Column("dropped", "drop_rate", "{:.1%}"),
        Column("speed-up", "speedup", "{:.3f}x"),
        Column("predicted", "predicted_speedup", "{:.3f}x"),
        Column("loss", "loss_before", "{:.4f}"),
        Column("with", "loss", "{:.4f}"),
    )
    return [
        table(
            "Simulated, on steps that the threshold was not chosen from",
            simulated,
            results["simulated"],
        ),
        table(
            "Measured: two processes, one of which is late",
            measured,
            results["processes"],
            "loss: on held-out text, at the time at which the first of both runs ended.",
        ),
    ]


def check(config: Config) -> None:
    """Raise CommandError if an option makes no sense."""
    for name in ("simulated_steps", "calibration_steps"):
        options.check_range(f"--{name.replace('_', '-')}", getattr(config, name), 3)
    if config.steps <= config.calibration_steps:
        raise CommandError(
            f"--steps is {config.steps}: give more than --calibration-steps, "
            f"{config.calibration_steps}."
        )


@benchmark("research/drop_compute")
def main(config: Config) -> Report:
    """Simulate, and measure."""
    check(config)
    runs = measure(config) if config.seeds else []
    results = simulate(config)
    results |= {"processes": compare(runs, config.calibration_steps), "runs": runs}
    return Report(results=results, shown=as_tables(results), draw=lambda: draw(results))


if __name__ == "__main__":
    run(main, __doc__)
