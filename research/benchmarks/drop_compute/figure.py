"""Plot of a step with a threshold, of the gain, and of two real processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dynamiq_research.drop_compute.plots import BLUE, GRAY, draw_sweep

RED = "#c92a2a"


def draw(results: dict[str, Any]) -> Figure:
    """Draw the results of `research.benchmarks.drop_compute`."""
    runs = results["runs"]
    figure = Figure(figsize=(16 if runs else 11, 4.6), layout="constrained")
    axes = figure.subplots(1, 3 if runs else 2)
    _draw_step(axes[0], np.asarray(results["step"]["times"]), results["step"]["threshold"])
    draw_sweep(axes[1], results["sweep"], results["sweep_threshold"])
    axes[1].set_title("Simulated: 200 workers, normal latencies")
    if runs:
        _draw_losses(axes[2], runs)
    return figure


def _draw_step(axis: Any, times: np.ndarray, threshold: float) -> None:
    """Draw the micro-batches of the workers of one step [workers, micro_batches] as bars."""
    ends = times.cumsum(axis=1)
    starts = ends - times
    done = starts < threshold
    for kind, color, label in ((done, BLUE, "done"), (~done, "#dee2e6", "not started: dropped")):
        rows, columns = np.nonzero(kind)
        axis.barh(
            rows,
            times[rows, columns],
            left=starts[rows, columns],
            height=0.75,
            color=color,
            edgecolor="white",
            label=label,
        )
    last = np.where(done, ends, 0).max()
    axis.axvline(threshold, color=RED, lw=1.8, label="threshold")
    axis.axvline(last, color=BLUE, ls="--", lw=1.5, label="all-reduce with the threshold")
    axis.axvline(ends.max(), color=GRAY, ls="--", lw=1.5, label="all-reduce without it")
    axis.set(xlabel="seconds of one step", ylabel="worker", title="One step of ten workers")
    axis.set_yticks(range(len(times)))
    axis.invert_yaxis()
    axis.set_ylim(len(times) + 3.2, -0.6)
    axis.legend(loc="lower left", ncols=2, frameon=False, fontsize=8)


def _draw_losses(axis: Any, runs: Sequence[dict[str, Any]]) -> None:
    for threshold, color, label in ((False, GRAY, "no threshold"), (True, BLUE, "threshold")):
        chosen = [run for run in runs if run["threshold"] == threshold]
        for index, run in enumerate(chosen):
            clock = np.concatenate([[0.0], np.cumsum(run["seconds"])])[run["stops"]]
            axis.plot(clock, run["losses"], color=color, lw=1.4, label=label if not index else None)
    axis.set(
        xlabel="training time (s)",
        ylabel="evaluation loss (nats a token)",
        title="Measured: two processes, one of which is late",
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
