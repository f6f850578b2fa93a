"""Fine-tune a real language model with every method, from the same weights on the same batches.

    make demo-llm
    python -m benchmarks.real_lm.training --methods exact dynamiq:5

A run takes about half an hour on two cores. A run that is interrupted goes on from its last
checkpoint, and runs that the result file has are not run again.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import common
from benchmarks.real_lm.texts import Text, documents
from dynamiq_jax._console import tables
from examples import finetune_llm
from examples.llm import checkpoint
from examples.llm.run import CHECKPOINTS
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
    """Peak of the learning rate of AdamW."""


def main(config: Config) -> None:
    """Run what the result file lacks, and print its table."""
    console = Console(emoji=False)
    settings = dataclasses.asdict(config) | {"model": config.model.name, "folder": ""}
    ignored = ("methods", "seeds", "folder")
    rows = common.earlier_results(NAME, settings, but=ignored) or []
    done = {(row["method"], row["seed"]) for row in rows}
    config.folder.mkdir(parents=True, exist_ok=True)
    data = config.folder / f"{config.text}.jsonl"
    if not data.exists():
        write_documents(data, config)
    options = finetune_llm.Options(
        checkpoint=config.model,
        data=data,
        workers=config.workers,
        batch=1,
        context=config.context,
        steps=config.steps,
        learning_rate=config.learning_rate,
    )
    mesh = finetune_llm.make_mesh(options)
    model, task = finetune_llm.read_task(options, mesh)
    for seed in range(config.seeds):
        for method in config.methods:
            if (method, seed) in done:
                continue
            folder = config.folder / f"{method.replace(':', '-')}-{seed}"
            recipe = Recipe(
                method=method, steps=config.steps, learning_rate=config.learning_rate, seed=seed
            )
            params, records = finetune_llm.shown(
                console, f"{method}, seed {seed}", task, recipe, folder, save_every=25
            )
            if method == "exact" and seed == 0:  # for gradients of later steps
                checkpoint.save(folder / "model", model, params, config.model)
            del params
            rows.append({"method": method, "seed": seed} | summary(records))
            common.save(NAME, settings, rows)
            shutil.rmtree(folder / CHECKPOINTS)
    console.print(table(rows))


def write_documents(file: Path, config: Config) -> None:
    """Write the documents that all runs train on."""
    chosen = documents(config.text)[: config.count]
    key = "text" if config.text == "plain" else "messages"
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
