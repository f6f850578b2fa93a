"""The report: what two runs recorded, as a table, a plot and a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from rich.table import Table

from .comparison import LAST_STEPS, Run

matplotlib.use("Agg")  # The plot goes to a file: no display is needed.
import matplotlib.pyplot as plt

EXACT_COLOR, COMPRESSED_COLOR, ERROR_COLOR = "#9aa5b1", "#d9480f", "#1864ab"


@dataclass(frozen=True)
class Wire:
    """What one all-reduce sends.

    Attributes:
        bytes_per_worker: Bytes that each worker sends.
        bits: Bits per coordinate, everything included.
        ratio_f32: How many times less than float32 gradients.
        ratio_bf16: How many times less than bfloat16 gradients.
    """

    bytes_per_worker: int
    bits: float
    ratio_f32: float
    ratio_bf16: float


@dataclass(frozen=True)
class Comparison:
    """Two runs that differ in how they average gradients, and in nothing else.

    Attributes:
        method: Name of the compressed method.
        exact: The run with the exact mean.
        compressed: The run with the compressed mean.
        exact_wire: What the exact mean sends.
        compressed_wire: What the compressed mean sends.
        vnmse: Error of the compressed mean by step.
    """

    method: str
    exact: Run
    compressed: Run
    exact_wire: Wire
    compressed_wire: Wire
    vnmse: dict[int, float]

    @property
    def mean_vnmse(self) -> float:
        """Mean over the sampled steps."""
        return fmean(self.vnmse.values())


def table(comparison: Comparison) -> Table:
    """Lays the two runs side by side."""
    exact, compressed = comparison.exact, comparison.compressed
    exact_wire, wire = comparison.exact_wire, comparison.compressed_wire
    rows = Table(title="Fine-tuning with the exact and with the compressed mean", min_width=72)
    rows.add_column("")
    rows.add_column("exact", justify="right")
    rows.add_column(comparison.method, justify="right", style="bold")
    rows.add_column("gap", justify="right")

    def loss(name: str, before: float, after: float) -> None:
        rows.add_row(name, f"{before:.4f}", f"{after:.4f}", f"{after / before - 1:+.2%}")

    loss(
        f"train loss, last {LAST_STEPS} steps", exact.final_train_loss, compressed.final_train_loss
    )
    loss("evaluation loss", exact.final_evaluation_loss, compressed.final_evaluation_loss)
    rows.add_section()
    rows.add_row(
        "bytes sent per worker and step",
        f"{exact_wire.bytes_per_worker:,}",
        f"{wire.bytes_per_worker:,}",
        f"{wire.bytes_per_worker / exact_wire.bytes_per_worker - 1:+.1%}",
    )
    rows.add_row("bits per coordinate", f"{exact_wire.bits:.2f}", f"{wire.bits:.2f}")
    rows.add_row("compression against float32", "1.00x", f"{wire.ratio_f32:.2f}x")
    rows.add_row("compression against bfloat16", "0.50x", f"{wire.ratio_bf16:.2f}x")
    rows.add_row("vNMSE of the mean gradient", "0", f"{comparison.mean_vnmse:.2e}")
    rows.add_section()
    rows.add_row(
        "time per step",
        f"{exact.step_seconds * 1e3:.0f} ms",
        f"{compressed.step_seconds * 1e3:.0f} ms",
        f"{compressed.step_seconds / exact.step_seconds - 1:+.0%}",
    )
    return rows


def save_json(comparison: Comparison, options: dict[str, Any], path: Path) -> None:
    """Writes everything that was recorded, and the options that led to it."""
    summary: dict[str, Any] = {
        name: {
            "train_loss": run.final_train_loss,
            "evaluation_loss": run.final_evaluation_loss,
            "step_seconds": run.step_seconds,
        }
        for name, run in (("exact", comparison.exact), ("compressed", comparison.compressed))
    }
    summary["mean_vnmse"] = comparison.mean_vnmse
    content = {"options": options, "summary": summary, "recorded": asdict(comparison)}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def save_plot(comparison: Comparison, path: Path) -> None:
    """Draws the losses of both runs and, below, the error of the compressed mean."""
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11}
    with plt.rc_context(style):
        figure, (losses, error) = plt.subplots(
            2, sharex=True, figsize=(8, 6.5), height_ratios=(2, 1), layout="constrained"
        )
        # A wide pale line under a thin strong one: where the curves agree, both stay visible.
        _draw_run(losses, comparison.exact, "exact mean", EXACT_COLOR, width=5)
        _draw_run(losses, comparison.compressed, comparison.method, COMPRESSED_COLOR, width=1.6)
        losses.set_ylabel("loss (nats per token)")
        losses.legend(frameon=False, loc="upper right")
        wire = comparison.compressed_wire
        losses.set_title(
            f"Fine-tuning at {wire.bits:.2f} bits per coordinate: "
            f"{wire.ratio_bf16:.1f}x less to send than bfloat16",
            loc="left",
        )

        error.plot(*zip(*comparison.vnmse.items(), strict=True), "o-", color=ERROR_COLOR)
        error.ticklabel_format(axis="y", scilimits=(0, 0))
        error.set_ylim(0, 1.25 * max(comparison.vnmse.values()) or 1)
        error.set_ylabel("vNMSE of the mean")
        error.set_xlabel("fine-tuning step")
        for axes in (losses, error):
            axes.grid(alpha=0.25)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_run(axes: plt.Axes, run: Run, name: str, color: str, width: float) -> None:
    """Training loss, smoothed, and evaluation loss as points."""
    axes.plot(_smooth(run.train_loss), color=color, lw=width, label=f"{name}: training, smoothed")
    axes.plot(
        *zip(*run.evaluation_loss.items(), strict=True),
        "o--",
        color=color,
        lw=width / 2,
        ms=4 + width,
        label=f"{name}: evaluation",
    )


def _smooth(values: list[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average, started at the first value."""
    smoothed, mean = [], values[0]
    for value in values:
        mean = decay * mean + (1 - decay) * value
        smoothed.append(mean)
    return smoothed
