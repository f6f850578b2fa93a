"""Fine-tune a real language model with every method, from the same weights on the same batches.

    make demo-llm
    python -m benchmarks.real_lm.training --methods exact dynamiq:5
    python -m benchmarks.real_lm.training --optimizer muon --workers 2 --steps 20 \\
        --methods exact dynamiq:5 dynamiq:3

A run takes about half an hour on two cores. A run that is interrupted goes on from its last
checkpoint, and runs that the result file has are not run again. The result file of an optimizer
other than AdamW has its name. Runs of other steps, rows or workers belong into another file:

    python -m benchmarks.real_lm.training --steps 40 --folder results/short --output short.json
"""

import dataclasses
import json
import multiprocessing
import re
import shutil
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding
from rich.table import Table

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark
from benchmarks.harness.command import run as run_benchmark
from benchmarks.real_lm.folder import TRAINED, check_folder
from benchmarks.real_lm.gradients import KINDS, kind_of
from benchmarks.real_lm.losses import by_method
from benchmarks.real_lm.policies import FROM_TWO, POLICIES
from benchmarks.real_lm.texts import Text, file_of
from benchmarks.training.muon import muon
from dynamiq_jax._console import tables
from dynamiq_jax._measurement.settings import installed
from examples import finetune_llm
from examples.llm import checkpoint
from examples.llm.loss import evaluator
from examples.llm.model import Params
from examples.llm.progress import train_shown
from examples.llm.recipe import Recipe
from examples.llm.run import (
    CHECKPOINTS,
    FACTS,
    METRICS,
    Task,
    check_facts,
    check_runs,
    read_records,
)
from examples.tools import digests

NAME = "real_lm_training"
SAVE_EVERY = 25  # steps
FOUND = "found.json"  # in the folder of a run: what is measured at its end
# Options on which the losses of all runs of a result file depend.
SHARED = ("text", "count", "workers", "steps", "context", "learning_rate", "optimizer")
METHODS = installed(
    (
        *("exact", "dynamiq:5", "dynamiq:4", "mxfp8", "mxfp4", "bf16", "dynamiq:3"),
        "ef+topk_chunked:5",
    )
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: Path = Path("results/smollm2")
    """Folder of the model."""

    folder: Path = Path("results/real_lm_training")
    """Where runs keep their checkpoints."""

    output: Path | None = None
    """Result file; None for real_lm_training.json in benchmarks/results."""

    text: Text = "chats"
    """Kind of text."""

    count: int = 640
    """Documents, of which a tenth is held out."""

    methods: tuple[str, ...] = METHODS
    """METHOD[:BITS], or the name of one of the policies, which have methods by kind of tensor."""

    seeds: int = 1
    """Runs of each method; a seed chooses the batches and the rounding."""

    workers: int = 4
    """Data-parallel workers, on a ring."""

    steps: int = 150
    """Updates."""

    context: int = 128
    """Tokens of a row; each worker takes one in each step."""

    learning_rate: float = 5e-5
    """Peak of the learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon orthogonalizes the updates of matrices, on each worker: a step takes 15 seconds more
    for each."""

    rare: int = 3
    """Occurrences in the training rows below which a token counts as rare."""

    @property
    def result(self) -> Path:
        """The result file."""
        name = NAME if self.optimizer == "adamw" else f"{NAME}_{self.optimizer}"
        return self.output or files.path_of(name)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the runs of a result file have in common."""
        return {"model": self.model.name} | {name: getattr(self, name) for name in SHARED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonRecipe(Recipe):
    """A recipe with Muon in place of AdamW."""

    rule: str = "muon"  # of updates, which tells its runs from those of AdamW

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Build the transformation from the mean gradient to the update."""
        return muon(schedule)


@benchmark(NAME)
def main(config: Config) -> Report:
    """Run what the result file lacks."""
    check_folder(config.model)
    config.folder.mkdir(parents=True, exist_ok=True)
    data = file_of(config.folder, config.text, config.count)
    settings = config.settings | {"documents": digests.of_files([data])}
    rows = earlier_rows(config.result, settings)
    done = {(row["method"], row["seed"]) for row in rows}
    for seed in range(config.seeds):
        for method in config.methods:
            if (method, seed) in done:
                continue
            # In a process of its own: what a run leaves in memory would be missing in the next. It
            # ends with this one, or a second command would train into the same folder.
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(config, data, method, seed), daemon=True
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{method}, seed {seed}: the run failed, see above.")
            records = read_records(folder_of(config, method, seed) / METRICS)
            found = json.loads((folder_of(config, method, seed) / FOUND).read_text())
            row = {"method": method, "seed": seed} | summary(records) | found | files.stamp()
            rows.append(row)
            files.write(config.result, settings, rows)
            shutil.rmtree(folder_of(config, method, seed) / CHECKPOINTS)
    return Report(shown=[as_table(rows)])


def earlier_rows(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the runs of a result file, or end the program if they have other settings."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    before = {name: earlier["config"].get(name) for name in settings}
    differ = [name for name in settings if before[name] != settings[name]]
    changed = [f"{name} {before[name]}, now {settings[name]}" for name in differ]
    if changed:
        raise SystemExit(
            f"{path} has runs of {', '.join(changed)}. Give the same options, or another --output "
            "and another --folder."
        )
    return earlier["results"]


def run(config: Config, data: Path, method: str, seed: int) -> None:
    """Train with a method, from its last checkpoint if there is one."""
    try:
        train(config, data, method, seed)
    except (ValueError, OSError) as problem:
        raise SystemExit(f"{method}, seed {seed}: {problem}") from None


def train(config: Config, data: Path, method: str, seed: int) -> None:
    """Train with a method; of an exact run the model is kept."""
    options = finetune_llm.Options(
        checkpoint=config.model,
        data=data,
        workers=config.workers,
        batch=1,
        context=config.context,
        steps=config.steps,
        learning_rate=config.learning_rate,
    )
    model, task = finetune_llm.read_task(options, finetune_llm.make_mesh(options))
    recipe = (Recipe if config.optimizer == "adamw" else MuonRecipe)(
        method={**POLICIES, **FROM_TWO}.get(method, method),
        route="all_reduce_gradients",  # for states, policies and metrics
        steps=config.steps,
        learning_rate=config.learning_rate,
        seed=seed,
    )
    folder, name = folder_of(config, method, seed), f"{method}, seed {seed}"
    if (folder / FACTS).exists():
        # Also of a run that has ended, whose checkpoints are deleted.
        remedy = "Delete that folder, or give another --folder."
        check_facts(folder / FACTS, task.facts(recipe), remedy)
    console = tables.console()
    console.print(check_runs(task, {folder: recipe}, SAVE_EVERY), soft_wrap=True)
    params, _ = train_shown(console, task, recipe, folder, SAVE_EVERY, name)
    if method == "exact":  # for gradients of later steps, and for the distance of other runs
        checkpoint.save(folder / TRAINED, model, params, config.model)
    exact = folder_of(config, "exact", seed) / TRAINED
    place = SingleDeviceSharding(jax.devices()[0])
    found: dict[str, Any] = {"rare": loss_of_rare_tokens(task, params, config.rare)}
    if exact.exists():
        found["distance"] = distances(task, params, checkpoint.load(exact, model, place))
    (folder / FOUND).write_text(json.dumps(found))


def loss_of_rare_tokens(task: Task, params: Params, occurrences: int) -> float | None:
    """Return the held-out loss of targets that occur less often in the training rows.

    None if there are no such targets.
    """
    held_out = task.held_out
    counts = np.bincount(task.rows.targets[task.rows.learned], minlength=1 + held_out.targets.max())
    rare = held_out._replace(learned=held_out.learned & (counts[held_out.targets] < occurrences))
    if not rare.learned.any():
        return None
    return evaluator(task.structure, rare, task.mesh.shape["data"] * task.batch, task.mesh)(params)


def distances(task: Task, params: Params, exact: Params) -> dict[str, float]:
    """Return how far a run ends from the exact run, over the way of that run, by kind of tensor."""
    squares = {kind: np.zeros(2) for kind in (*KINDS, "all")}
    leaves = (checkpoint.named_leaves(tree) for tree in (params, exact, task.load()))
    for (name, own), (_, end), (_, start) in zip(*leaves, strict=True):
        own, end, start = (np.asarray(leaf, np.float64) for leaf in (own, end, start))
        pair = np.array([np.sum((own - end) ** 2), np.sum((end - start) ** 2)])
        for kind in (kind_of(name), "all"):
            squares[kind] += pair
    return {kind: float(np.sqrt(apart / way)) for kind, (apart, way) in squares.items()}


def folder_of(config: Config, method: str, seed: int) -> Path:
    """Return the folder of a run."""
    name = re.sub(r"[^\w+.=]+", "-", f"{method}-{seed}")
    return config.folder / (name if config.optimizer == "adamw" else f"{config.optimizer}-{name}")


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is kept of a run: held-out losses by step, and means over steps."""
    steps = records[1:]
    return {
        "held_out": {
            str(r["step"]): r["evaluation_loss"] for r in records if "evaluation_loss" in r
        },
        "loss": fmean(record["loss"] for record in steps[-20:]),
        "losses": [round(record["loss"], 5) for record in steps],
        "error": fmean(record["error"] for record in steps),
        "bytes": steps[-1]["bytes"],
        "seconds": median(record["seconds"] for record in steps),
    }


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Tabulate final losses, and how far they are from those of the exact runs."""
    columns = (
        Column("method", "method"),
        Column("held-out loss", "loss", "{:.4f}"),
        Column("against exact", "off", "{:+.2%}"),
        Column("vNMSE", "error", "{:.1e}"),
        Column("MB a step", lambda mean: mean["bytes"] / 1e6, "{:.0f}"),
    )
    return table("Fine-tuning", columns, list(by_method(rows)))


if __name__ == "__main__":
    run_benchmark(main, __doc__)
