"""Comparison of runs in a table."""

from statistics import fmean, median
from typing import Any

import jax
from rich.table import Table

from examples.llm.run import Record


def table(runs: dict[str, list[Record]]) -> Table:
    """Tabulate the records of runs side by side, by their names."""
    start = next(iter(runs.values()))[0]["evaluation_loss"]
    rows = Table("", *runs, title="Fine-tuning", caption=f"before: held-out loss {start:.4f}")
    if jax.process_count() == 1:
        rows.caption = f"{rows.caption}. All workers are in one process: no bytes cross a link here"
        rows.caption += ", so that compression only takes time."

    def add(title: str, name: str, show: str, average: Any = fmean, last: int = 0) -> None:
        values = ([r[name] for r in records if name in r] for records in runs.values())
        rows.add_row(title, *(show.format(average(each[-last:])) for each in values))

    add("held-out loss", "evaluation_loss", "{:.4f}", last=1)
    add("training loss, last 20 steps", "loss", "{:.4f}", last=20)
    add("bytes sent a step", "bytes", "{:,.0f}")
    add("estimated vNMSE of the mean", "error", "{:.1e}")
    # The median leaves out the first step, which compiles.
    add("seconds a step, here", "seconds", "{:.2f}", median)
    return rows
