"""What the records of runs look like: as the runs of the first example's report, and plotted."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from rich.table import Table
from small_lm.comparison import Run
from small_lm.report import COMPRESSED_COLOR, EXACT_COLOR

from .metrics import Record

matplotlib.use("Agg")  # The plot goes to a file: no display is needed.
import matplotlib.pyplot as plt


def as_run(records: list[Record]) -> Run:
    """Records as the report of the first example has them."""
    updates = [record for record in records if "loss" in record]
    return Run(
        train_loss=[record["loss"] for record in updates],
        evaluation_loss=_by_step(records, "evaluation_loss"),
        seconds=[record["seconds"] for record in updates],
    )


def vnmse_by_step(records: list[Record]) -> dict[int, float]:
    """Error of the mean gradient, by the number of steps before it."""
    return {step - 1: value for step, value in _by_step(records, "vnmse").items()}


def table(runs: dict[str, list[Record]]) -> Table:
    """How well each run predicts the held-out text, before and after."""
    rows = Table(title="Held-out text", min_width=72)
    for name in ("", "loss", "perplexity", "next token right"):
        rows.add_column(name, justify="right" if name else "left")
    before = next(iter(runs.values()))[0]
    lines = {"before": before} | {f"after: {name}": run[-1] for name, run in runs.items()}
    for name, record in lines.items():
        rows.add_row(
            name,
            f"{record['evaluation_loss']:.4f}",
            f"{record['perplexity']:.2f}",
            f"{record['accuracy']:.2%}",
        )
    return rows


def save_plot(runs: dict[str, list[Record]], path: Path) -> None:
    """Draws training losses and, below, the perplexity of the held-out text.

    Args:
        runs: Records by the name of the run; the first is drawn pale if there are two.
        path: The image to write.
    """
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 11}
    colors = [EXACT_COLOR, COMPRESSED_COLOR][-len(runs) :]
    with plt.rc_context(style):
        figure, (losses, perplexities) = plt.subplots(
            2, sharex=True, figsize=(8, 6.5), layout="constrained"
        )
        for (name, records), color, width in zip(runs.items(), colors, (4, 1.6), strict=False):
            style = {"color": color, "lw": width, "label": name}
            losses.plot(*zip(*_by_step(records, "loss").items(), strict=True), **style)
            points = _by_step(records, "perplexity")
            perplexities.plot(*zip(*points.items(), strict=True), "o-", **style)
        losses.set_ylabel("training loss (nats per token)")
        perplexities.set_ylabel("held-out perplexity")
        perplexities.set_xlabel("fine-tuning step")
        losses.legend(frameon=False)
        for axes in (losses, perplexities):
            axes.grid(alpha=0.25)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _by_step(records: list[Record], name: str) -> dict[int, float]:
    return {record["step"]: record[name] for record in records if name in record}
