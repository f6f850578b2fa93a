"""The command: the gain of a compute threshold, from latencies of micro-batches."""

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.table import Table

from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.environment import environment
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_seconds
from dynamiq_research.drop_compute import prediction as predictions
from dynamiq_research.drop_compute.plots import draw_steps, draw_sweep
from dynamiq_research.drop_compute.prediction import (
    MadeUp,
    Noise,
    Rule,
    ThresholdPrediction,
    read_latencies,
)
from dynamiq_research.drop_compute.thresholds import Latencies


@dataclasses.dataclass(frozen=True)
class Predict:
    """Gain of gradient accumulation that stops at a compute threshold (DropCompute).

    Chooses the threshold on half of the steps of a table of latencies, and replays the other half
    with it. The table comes from a file, such as one that a run wrote with
    np.savez(FILE, **drop_compute.latencies._asdict()), or is made up: all workers and steps are
    simulated then. Nothing is trained.

    The law is that of independent normal latencies. If the replay is far from it, latencies have
    heavier tails, or some workers are always slower: trust the replay.
    """

    latencies: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """.npz with `times` [steps, workers, micro_batches] in seconds, and maybe `rest` [steps]; or
    .csv with the columns step,worker,micro_batch,seconds. Then nothing is made up."""

    workers: int = 200
    """Simulated workers."""

    micro_batches: int = 12
    """Micro-batches of a worker and step."""

    noise: Noise = "lognormal"
    """Distribution of latencies. Those that are not normal have a constant part and a random
    delay."""

    mean: float = 0.45
    """Mean seconds of a micro-batch."""

    deviation: float = 0.3
    """Standard deviation of a micro-batch, as a share of the mean."""

    rest: float = 0.3
    """Seconds of a step after the accumulation: all-reduce and optimizer."""

    steps: int = 200
    """Simulated steps."""

    max_drop: float = 0.1
    """Share of micro-batches that may be dropped."""

    min_done: int = 1
    """Micro-batches that every worker does in every step."""

    in_flight: int = 0
    """Micro-batches that are queued behind the one that the check waits for."""

    seed: int = 0
    """Seed of the made-up latencies."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the prediction to this file, with speed-ups at 40 thresholds."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw speed-up and drop rate against the threshold, and times of steps (.png, .svg, .pdf)."""

    def run(self) -> int:
        """Print the prediction; return the exit status."""
        options.check_outputs(self.json, self.plot)
        rule = self._rule()
        console = tables.console()
        try:
            latencies = self._latencies()
            with console.status("Replaying"):
                prediction = predictions.predict(latencies, rule)
        except ValueError as error:
            raise CommandError(str(error)) from None
        _, held_out = predictions.split_in_half(latencies)
        swept = predictions.sweep(held_out, rule) if self.json or self.plot else []
        console.print(self._table(latencies, prediction))
        console.print(_advice(prediction))
        if self.json is not None:
            results = {"prediction": dataclasses.asdict(prediction), "sweep": swept}
            records.write(self.json, environment("none"), dataclasses.asdict(self), results)
        if self.plot is not None:
            from matplotlib.figure import Figure

            threshold = prediction.chosen.threshold
            figure = Figure(figsize=(11, 4.2), layout="constrained")
            left, right = figure.subplots(1, 2)
            draw_sweep(left, swept, threshold)
            draw_steps(right, *predictions.step_seconds(held_out, threshold, rule))
            figure.savefig(self.plot, dpi=150)
        return 0

    def _rule(self) -> Rule:
        if not 0 <= self.max_drop <= 1:
            raise CommandError(f"--max-drop is {self.max_drop}: give a share from 0 to 1.")
        options.check_range("--min-done", self.min_done, 1)
        options.check_range("--in-flight", self.in_flight, 0)
        return Rule(max_drop=self.max_drop, min_done=self.min_done, in_flight=self.in_flight)

    def _latencies(self) -> Latencies:
        options.check_range("--rest", self.rest, 0)
        if self.latencies is not None:
            return read_latencies(self.latencies, self.rest)
        for name, least in (("workers", 1), ("micro_batches", 1), ("steps", 2), ("deviation", 0)):
            options.check_range(f"--{name.replace('_', '-')}", getattr(self, name), least)
        if not 0 < self.mean < np.inf:
            raise CommandError(f"--mean is {self.mean}: give seconds above 0.")
        options.check_range("--seed", self.seed, 0, options.MAX_SEED)
        made_up = MadeUp(
            noise=self.noise,
            workers=self.workers,
            micro_batches=self.micro_batches,
            mean=self.mean,
            deviation=self.deviation,
            rest=self.rest,
        )
        return made_up.draw(self.steps, self.seed)

    def _table(self, latencies: Latencies, prediction: ThresholdPrediction) -> Table:
        steps, workers, micro_batches = latencies.times.shape
        source = f"{self.noise} latencies, simulated" if self.latencies is None else self.latencies
        made = tables.table(
            f"{workers} workers, {micro_batches} micro-batches a step, {steps} steps: {source}",
            ("step",),
            ("threshold", "dropped", "time of a step", "speed-up", "law"),
        )
        made.add_row(
            "without a threshold",
            "none",
            "0.0%",
            format_seconds(prediction.held_out.step_seconds_before),
            "1.000x",
            "",
        )
        for name, effect, law in (
            ("as chosen on the first half", prediction.chosen, None),
            ("on the second half", prediction.held_out, prediction.law),
            ("there, if cut off at the threshold", prediction.cut, prediction.cut_law),
        ):
            threshold = effect.threshold
            made.add_row(
                name,
                format_seconds(threshold) if np.isfinite(threshold) else "none",
                f"{effect.drop_rate:.1%}",
                format_seconds(effect.step_seconds),
                f"{effect.speedup:.3f}x",
                "" if law is None else f"{law:.3f}x",
            )
        made.caption = (
            "speed-up: micro-batches a second. law: for independent normal latencies of the same "
            "mean and deviation.\nA worker checks between micro-batches; the last row, the model "
            "of the paper, would need a device that drops a running one."
        )
        return made


def _advice(prediction: ThresholdPrediction) -> str:
    held_out = prediction.held_out
    if not np.isfinite(held_out.threshold) or held_out.speedup <= 1:
        return (
            "No threshold helps: latencies vary too little, or too much inside one micro-batch. "
            "For the latter, try more and smaller micro-batches."
        )
    return (
        f"Predicted: {held_out.speedup:.2f}x as many micro-batches a second with a threshold of "
        f"{format_seconds(held_out.threshold)}. For as many samples as before, train "
        f"{1 / (1 - held_out.drop_rate):.2f}x as many steps."
    )
