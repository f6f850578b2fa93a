"""Time to accuracy of fine-tuning a real language model over slow links, from measured parts.

    python -m benchmarks.real_lm.training
    python -m benchmarks.real_lm.time_to_accuracy

A step takes the time that one worker computes on this machine, and that of an all-reduce between
hosts emulated on this machine (root and iproute2) as `benchmarks.emulation` measures it. The latter
is of fewer coordinates than the model has, and scaled. Losses are those of the training runs, which
no link changes. All hosts share the cores of this machine, so that codecs take longer than on hosts
of their own.

The target is the held-out loss at which the exact run has made 99 % of its way. Between evaluations
a loss is taken to fall on a straight line.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.emulation import namespaces
from benchmarks.emulation.network import NetworkRun
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.real_lm import training
from benchmarks.real_lm.folder import check_folder
from benchmarks.real_lm.policies import POLICIES
from benchmarks.real_lm.texts import file_of
from benchmarks.training.emulated_training.target import FRACTIONS, reached, target_loss
from dynamiq_jax._console import tables
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate, parse_size
from dynamiq_jax._measurement.settings import PSUM, parse_settings
from examples import finetune_llm
from examples.llm.progress import train_shown
from examples.llm.recipe import Recipe

STEPS_ALONE = 6  # of one worker; the first ones are not counted
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: Path = Path("results/smollm2")
    """Folder of the model."""

    rates: tuple[str, ...] = ("100mbit", "1gbit", "10gbit")
    """Of every link, as tc spells them."""

    size: str = "16Mi"
    """Float32 coordinates of an all-reduce that is timed."""

    repeats: int = 3
    """Timed calls of each method at each rate. The median counts."""

    save: bool = True
    """Write the result to benchmarks/results/real_lm_time_to_accuracy.json."""


@benchmark("real_lm_time_to_accuracy")
def main(config: Config) -> Report:
    """Measure both parts of a step, and combine them with the losses."""
    check_folder(config.model)
    path = training.Config().result
    if not path.exists():
        raise SystemExit(f"{path} is missing. Run benchmarks.real_lm.training before.")
    runs = json.loads(path.read_text())
    # An all-reduce is timed on one vector, which has no kinds of tensors.
    named = [row for row in runs["results"] if row["method"] not in POLICIES]
    rows = [row for row in named if row["seed"] == 0]
    target = target_of(rows, path)
    rates, size = [parse_rate(rate, "--rates") for rate in config.rates], parse_size(config.size)
    namespaces.check_possible()
    console = tables.console()
    computing, parameters = seconds_alone(config.model, runs["config"], console)
    settings = {
        row["method"]: PSUM if row["method"] == "exact" else f"{row['method']}:ring" for row in rows
    }
    network = NetworkRun(
        parse_settings(tuple(settings.values())),
        runs["config"]["workers"],
        size=size,
        repeats=config.repeats,
        seed=0,
        timeout=600,
    )
    with tables.progress(console, "Emulated hosts", network.steps(len(rates))) as advance:
        _, measured = network.measure(rates, advance)
    seconds = {(r["setting"], r["rate"]): r["seconds"] * parameters / size for r in measured}
    results = {
        "computing": computing,
        "parameters": parameters,
        "target": target,
        "rows": [
            result(row, rate, computing + seconds[settings[row["method"]], rate], target)
            for rate in rates
            for row in rows
        ],
        "all_reduces": measured,
    }
    return Report(
        results=results,
        shown=[as_table(results)],
        options=files.options_of(config) | {"model": config.model.name},
    )


def target_of(rows: list[dict[str, Any]], path: Path) -> float:
    """Return the loss to reach, or end the program without a run that tells it."""
    exact = [row for row in rows if row["method"] == "exact"]
    if not exact:
        raise SystemExit(
            f"{path} has no exact run of seed 0. Run benchmarks.real_lm.training --methods exact."
        )
    return target_loss(list(exact[0]["held_out"].values()), FRACTIONS[0])


def seconds_alone(model: Path, of_runs: dict[str, Any], console: Console) -> tuple[float, int]:
    """Return the time of a step of one worker without a network, and the number of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        data = file_of(Path(folder), of_runs["text"], of_runs["count"])
        options = finetune_llm.Options(
            checkpoint=model,
            data=data,
            method="exact",
            workers=1,
            batch=1,
            context=of_runs["context"],
            steps=STEPS_ALONE,
        )
        _, task = finetune_llm.read_task(options, finetune_llm.make_mesh(options))
        recipe = Recipe(method="exact", steps=STEPS_ALONE, learning_rate=of_runs["learning_rate"])
        _, records = train_shown(
            console, task, recipe, Path(folder) / "run", STEPS_ALONE, "one worker"
        )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(task.shapes))
    return median(record["seconds"] for record in records[1 + WARM_UP :]), parameters


def result(row: dict[str, Any], rate: float, step: float, target: float) -> dict[str, Any]:
    """Combine the losses of a run with the time of its steps."""
    at, losses = [int(step) for step in row["held_out"]], list(row["held_out"].values())
    steps = reached(at, losses, target)
    return {
        "method": row["method"],
        "rate": rate,
        "step_seconds": step,
        "steps_to_target": steps,
        "seconds_to_target": None if steps is None else steps * step,
    }


def as_table(results: dict[str, Any]) -> Table:
    """Tabulate steps and times to the target; a row for each method and rate."""
    times = {(row["method"], row["rate"]): row["seconds_to_target"] for row in results["rows"]}

    def sooner_than(method: str) -> Callable[[dict[str, Any]], float | None]:
        def times_sooner(row: dict[str, Any]) -> float | None:
            own, other = row["seconds_to_target"], times.get((method, row["rate"]))
            return None if own is None or other is None else other / own

        return times_sooner

    def to_target(row: dict[str, Any]) -> str:
        own = row["seconds_to_target"]
        return "not reached" if own is None else format_seconds(own)

    columns = (
        Column("method", "method"),
        Column("link", lambda row: format_rate(row["rate"])),
        Column("a step", lambda row: format_seconds(row["step_seconds"])),
        Column("steps", "steps_to_target", "{:.0f}"),
        Column("time", to_target),
        Column("vs exact", sooner_than("exact"), "{:.2f}x"),
        Column("vs BF16", sooner_than("bf16"), "{:.2f}x"),
    )
    title = f"Time to a held-out loss of {results['target']:.4f}"
    return table(title, columns, results["rows"])


if __name__ == "__main__":
    run(main, __doc__)
