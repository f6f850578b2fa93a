"""Table of runs in Markdown, for a report."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import jax

from dynamiq_jax._console.units import format_seconds
from dynamiq_jax._prediction.device_speeds import kind_of
from examples.llm.prediction import predicted_seconds
from examples.llm.recipe import Recipe
from examples.llm.run import Record, Task

_LAST = 20  # steps, whose training loss is averaged


def text(task: Task, recipes: Mapping[str, Recipe], runs: Mapping[str, Sequence[Record]]) -> str:
    """Write the table of runs, and what its predictions assume.

    Args:
      task: model, data and devices of all runs.
      recipes: recipes by the name of the run. The first one is exact if one of them is.
      runs: records by the name of the run.
    """
    base, records = next(iter(runs.items()))
    workers, device = task.mesh.shape["data"], task.mesh.devices.flat[0]
    # Virtual devices of one process share its cores.
    is_shared = workers > 1 and device.platform == "cpu" and jax.process_count() == 1
    computing = _median_seconds(records) / (workers if is_shared else 1)
    lines = [
        f"{task.model}. Workers: {workers}. Steps: {len(records) - 1}, of {task.batch * workers} "
        f"rows of {task.rows.tokens.shape[1]} tokens each."
    ]
    predicted: dict[str, dict[str, float]] = {}
    if workers > 1:
        size = sum(leaf.size for leaf in jax.tree.leaves(task.shapes)) // task.mesh.shape["fsdp"]
        kind = kind_of(device.platform, device.device_kind)
        predicted = {
            name: predicted_seconds(
                recipe, size=size, workers=workers, computing=computing, device=kind
            )
            for name, recipe in recipes.items()
        }
        share = f"1/{workers} of" if is_shared else "with transfers,"
        lines.append(
            "Predicted: the all-reduce on a link of that speed for each worker, by the cost model "
            f"of `dynamiq-jax advise`, after {format_seconds(computing)} of computing ({share} the "
            f"{base} step here). Every method is taken to encode as fast as DynamiQ."
        )
    if is_shared:
        lines.append(
            "Measured: all workers share this machine and no bytes cross a link, so compression "
            "only takes time."
        )
    return "\n".join([table(runs, predicted), "", *lines])


def table(
    runs: Mapping[str, Sequence[Record]], predicted: Mapping[str, Mapping[str, float]]
) -> str:
    """Write the records of runs side by side, as a table in Markdown.

    Args:
      runs: records by the name of the run: of step 0, and of each step.
      predicted: seconds of a step by the name of the run and the speed of the link; may be empty.
    """
    rows = [["", *runs]]

    def add(title: str, cell: Callable[[str, Sequence[Record]], str]) -> None:
        rows.append([title, *(cell(name, records) for name, records in runs.items())])

    def values(records: Sequence[Record], field: str) -> list[Any]:
        return [record[field] for record in records if field in record]

    add("held-out loss before", lambda _, r: f"{r[0]['evaluation_loss']:.4f}")
    add("held-out loss", lambda _, r: f"{values(r, 'evaluation_loss')[-1]:.4f}")
    last = f"training loss, last {_LAST} steps"
    add(last, lambda _, r: f"{fmean(values(r, 'loss')[-_LAST:]):.4f}")
    add("bytes sent a step by each device", lambda _, r: f"{r[-1]['bytes']:,.0f}")
    if any("error" in record for records in runs.values() for record in records):
        add("estimated vNMSE of the mean", lambda _, r: _error(values(r, "error")))
    add("time a step, measured here", lambda _, r: format_seconds(_median_seconds(r)))
    for link in next(iter(predicted.values()), ()):
        at = f"time a step, predicted at {link}"
        rows.append([at, *(format_seconds(predicted[name][link]) for name in runs)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[1:] = [max(width, 4) for width in widths[1:]]
    rule = "| " + " | ".join(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]) + " |"
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], rule, *lines[1:]])


def _median_seconds(records: Sequence[Record]) -> float:
    """Return the usual time of a step, of which the first ones are slower."""
    return median(record["seconds"] for record in records if "seconds" in record)


def _error(errors: Sequence[float]) -> str:
    return f"{fmean(errors):.1e}" if errors else ""
