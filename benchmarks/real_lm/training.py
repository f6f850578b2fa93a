"""Fine-tune a real language model with every method, from the same weights on the same batches.

    make demo-llm
    python -m benchmarks.real_lm.training --methods exact dynamiq:5
    python -m benchmarks.real_lm.training --optimizer muon --workers 2 --steps 40

A run takes about half an hour on two cores. A run that is interrupted goes on from its last
checkpoint, and runs that the result file has are not run again. The result file of an optimizer
other than AdamW has its name.
"""

import dataclasses
import json
import multiprocessing
import shutil
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import optax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import common
from benchmarks.real_lm.texts import Text, documents
from benchmarks.training.muon import muon
from dynamiq_jax._console import tables
from examples import finetune_llm
from examples.llm import checkpoint
from examples.llm.run import CHECKPOINTS, METRICS, read_records
from examples.llm.training import Recipe

NAME = "real_lm_training"
METHODS = (
    *("exact", "dynamiq:5", "dynamiq:4", "mxfp8", "mxfp4", "bf16", "dynamiq:3"),
    "ef+topk_chunked:5",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tune a real language model with every method."""

    model: Path = Path("results/smollm2")
    """Folder of the model."""

    folder: Path = Path("results/real_lm_training")
    """Where runs keep their checkpoints."""

    text: Text = "chats"
    """Kind of text."""

    count: int = 640
    """Documents, of which a tenth is held out."""

    methods: tuple[str, ...] = METHODS
    """METHOD[:BITS]."""

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

    @property
    def result(self) -> str:
        """Name of the result file."""
        return NAME if self.optimizer == "adamw" else f"{NAME}_{self.optimizer}"


class MuonRecipe(Recipe):
    """A recipe with Muon in place of AdamW."""

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Build the transformation from the mean gradient to the update."""
        return muon(schedule)


def main(config: Config) -> None:
    """Run what the result file lacks, and print its table."""
    config.folder.mkdir(parents=True, exist_ok=True)
    data = config.folder / f"{config.text}.jsonl"
    if not data.exists():
        write_documents(data, config.text, config.count)
    settings = dataclasses.asdict(config) | {"model": config.model.name, "folder": ""}
    ignored = ("methods", "seeds", "folder", "optimizer")
    rows = common.earlier_results(config.result, settings, but=ignored) or []
    done = {(row["method"], row["seed"]) for row in rows}
    for seed in range(config.seeds):
        for method in config.methods:
            if (method, seed) in done:
                continue
            # In a process of its own: what a run leaves in memory would be missing in the next.
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(config, data, method, seed)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{method}, seed {seed}: the run failed, see above.")
            records = read_records(folder_of(config, method, seed) / METRICS)
            rows.append({"method": method, "seed": seed} | summary(records))
            common.save(config.result, settings, rows)
            shutil.rmtree(folder_of(config, method, seed) / CHECKPOINTS)
    Console(emoji=False).print(table(rows))


def run(config: Config, data: Path, method: str, seed: int) -> None:
    """Train with a method, from its last checkpoint if there is one."""
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
        method=method, steps=config.steps, learning_rate=config.learning_rate, seed=seed
    )
    folder, console = folder_of(config, method, seed), Console(emoji=False)
    params, _ = finetune_llm.shown(
        console, f"{method}, seed {seed}", task, recipe, folder, save_every=25
    )
    if method == "exact" and seed == 0:  # for gradients of later steps
        checkpoint.save(folder / "model", model, params, config.model)


def folder_of(config: Config, method: str, seed: int) -> Path:
    """Return the folder of a run."""
    name = f"{method.replace(':', '-')}-{seed}"
    return config.folder / (name if config.optimizer == "adamw" else f"{config.optimizer}-{name}")


def write_documents(file: Path, text: Text, count: int) -> None:
    """Write the documents that all runs train on."""
    chosen = documents(text)[:count]
    key = "text" if text == "plain" else "messages"
    file.write_text("".join(json.dumps({key: each}) + "\n" for each in chosen))


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


def table(rows: list[dict[str, Any]]) -> Table:
    """Tabulate final losses, and how far they are from those of the exact runs."""
    exact = {row["seed"]: final(row) for row in rows if row["method"] == "exact"}
    shown = tables.table(
        "Fine-tuning", ("method",), ("held-out loss", "against exact", "vNMSE", "MB a step")
    )
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        both = [final(row) / exact[row["seed"]] - 1 for row in own if row["seed"] in exact]
        shown.add_row(
            method,
            f"{fmean(map(final, own)):.4f}",
            f"{fmean(both):+.2%}" if both else "",
            f"{fmean(row['error'] for row in own):.1e}",
            f"{own[0]['bytes'] / 1e6:.0f}",
        )
    return shown


def final(row: dict[str, Any]) -> float:
    """Return the last held-out loss."""
    return list(row["held_out"].values())[-1]


if __name__ == "__main__":
    main(tyro.cli(Config))
