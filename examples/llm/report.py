"""Comparison of runs: a table, a plot and a JSON file."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jax
import matplotlib
from rich.table import Table

import dynamiq_jax as dq
from examples.llm.metrics import Record

matplotlib.use("Agg")  # The plot goes to a file; no display is needed.
import matplotlib.pyplot as plt

LAST_STEPS = 20
EXACT_COLOR, COMPRESSED_COLOR, ERROR_COLOR = "#9aa5b1", "#d9480f", "#1864ab"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run and its records."""

    name: str  # of its way to average gradients
    records: list[Record]  # as `finetune` returns them
    wire: dq.WireReport  # of one mean gradient

    def by_step(self, name: str) -> dict[int, float]:
        """Return the values recorded under a name, by the number of updates before them."""
        return {record["step"]: record[name] for record in self.records if name in record}

    def summary(self) -> dict[str, float]:
        """Return the figures by which runs are compared."""
        last = self.records[-1]
        return {
            # The mean over the last steps is less noisy than the last loss.
            "train_loss": fmean([*self.by_step("loss").values()][-LAST_STEPS:]),
            **{name: last[name] for name in ("evaluation_loss", "perplexity", "accuracy")},
            "bytes_per_worker": self.wire.bytes_per_worker,
            "bits": self.wire.bits,
            "ratio_f32": self.wire.ratio_f32,
            "ratio_bf16": self.wire.ratio_bf16,
            "vnmse": fmean(self.by_step("vnmse").values()),
            # Exact runs have no metrics of compression.
            "estimated_vnmse": fmean(self.by_step("compression/error").values() or [0.0]),
            # The median leaves out the first step, which compiles.
            "step_seconds": median(self.by_step("seconds").values()),
        }


def table(runs: Sequence[Run]) -> Table:
    """Tabulate runs side by side, and of two also the difference of the second from the first."""
    rows = Table(title="Fine-tuning", min_width=72, caption_justify="left")
    for heading in ("", "before", *(run.name for run in runs)):
        rows.add_column(heading, justify="right" if heading else "left")
    if len(runs) == 2:
        rows.add_column("difference", justify="right")
    before, summaries = runs[0].records[0], [run.summary() for run in runs]

    def add(title: str, name: str, show: Callable[[float], str], relative: str = "") -> None:
        values = [summary[name] for summary in summaries]
        cells = [show(before[name]) if name in before else "", *map(show, values)]
        if len(runs) == 2:
            cells.append(format(values[1] / values[0] - 1, relative) if relative else "")
        rows.add_row(title, *cells)

    add("held-out loss", "evaluation_loss", "{:.4f}".format, "+.2%")
    add("held-out perplexity", "perplexity", "{:.2f}".format, "+.2%")
    add("next token right", "accuracy", "{:.2%}".format)
    add(f"training loss, last {LAST_STEPS} steps", "train_loss", "{:.4f}".format, "+.2%")
    rows.add_section()
    add("bytes sent a step", "bytes_per_worker", "{:,}".format, "+.1%")
    add("bits per coordinate", "bits", "{:.2f}".format)
    add("compression against float32", "ratio_f32", "{:.2f}x".format)
    add("compression against bfloat16", "ratio_bf16", "{:.2f}x".format)
    add("vNMSE of the mean gradient", "vnmse", "{:.1e}".format)
    add("as estimated in every step", "estimated_vnmse", "{:.1e}".format)
    rows.add_section()
    add("time per step, here", "step_seconds", lambda seconds: f"{seconds * 1e3:.0f} ms", "+.0%")
    if len(runs) == 2 and jax.process_count() == 1:
        rows.caption = "All workers are in one process here. No bytes cross a link, so that "
        rows.caption += "compression only takes time."
    return rows


def save_json(runs: Sequence[Run], options: dict[str, Any], path: Path) -> None:
    """Write the summaries of runs and the options that they were started with."""
    # JSON has neither NaN nor Inf, which a run that diverged has as losses.
    summaries = {
        run.name: {name: value for name, value in run.summary().items() if isfinite(value)}
        for run in runs
    }
    content = {"options": options, "runs": summaries}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def save_plot(runs: Sequence[Run], path: Path) -> None:
    """Draw the losses of runs and, below, the error of the last run's mean gradient.

    Args:
      runs: at most two, a compressed one last.
      path: image to write.
    """
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11}
    # A thin strong line over a wide pale one: both are visible where the curves agree.
    looks = ((EXACT_COLOR, 5.0), (COMPRESSED_COLOR, 1.6))[-len(runs) :]
    with plt.rc_context(style):
        figure, (losses, error) = plt.subplots(
            2, sharex=True, figsize=(8, 6.5), height_ratios=(2, 1), layout="constrained"
        )
        for run, (color, width) in zip(runs, looks, strict=True):
            _draw_losses(losses, run, color, width)
        losses.set_ylabel("loss (nats per token)")
        losses.legend(frameon=False, loc="upper right")
        wire = runs[-1].wire
        losses.set_title(
            f"Fine-tuning at {wire.bits:.2f} bits per coordinate: "
            f"{wire.ratio_bf16:.1f}x less to send than bfloat16",
            loc="left",
        )
        errors = runs[-1].by_step("vnmse")
        error.plot(*zip(*errors.items(), strict=True), "o-", color=ERROR_COLOR)
        error.ticklabel_format(axis="y", scilimits=(0, 0))
        # Errors of a run that diverged are not finite.
        error.set_ylim(0, 1.25 * max(filter(isfinite, errors.values()), default=0) or 1)
        error.set_ylabel("vNMSE of the mean")
        error.set_xlabel("fine-tuning step")
        for axes in (losses, error):
            axes.grid(alpha=0.25)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_losses(axes: plt.Axes, run: Run, color: str, width: float) -> None:
    """Draw the smoothed training loss as a line and the held-out loss as points."""
    steps, values = zip(*run.by_step("loss").items(), strict=True)
    axes.plot(
        steps, _smooth(values), color=color, lw=width, label=f"{run.name}: training, smoothed"
    )
    axes.plot(
        *zip(*run.by_step("evaluation_loss").items(), strict=True),
        "o--",
        color=color,
        lw=width / 2,
        ms=4 + width,
        label=f"{run.name}: held-out",
    )


def _smooth(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Return the exponential moving average, which starts at the first value."""
    smoothed, mean = [], values[0]
    for value in values:
        mean = decay * mean + (1 - decay) * value
        smoothed.append(mean)
    return smoothed
