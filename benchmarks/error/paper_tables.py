"""The tables of the DynamiQ paper (arXiv 2602.08923) on gradients of a small language model, side
by side with the paper's own figures: methods, budgets, butterfly, ablation, workers.

    python -m benchmarks.error.dump_gradients --workers 64 --output gradients.npz
    python -m benchmarks.error.paper_tables --gradients gradients.npz
    python -m benchmarks.error.dump_gradients --model smollm2 --layers 5 15 25 --output smollm2.npz
    python -m benchmarks.error.paper_tables --gradients smollm2.npz --by-layer --workers 16 \\
        --output benchmarks/results/paper_tables_real_lm.json

Gradients differ from the paper's (a small byte-level model, or SmolLM2, instead of LLaMA, Gemma and
BERT), so only ratios inside a table compare. Rows without a figure are not in the paper.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.real_lm.gradients import LAYER, layer_of
from dynamiq_jax._measurement import gradient_files
from dynamiq_jax._measurement.gradient_files import Gradients, of_workers
from dynamiq_jax._measurement.settings import parse_setting
from dynamiq_jax._measurement.simulate import Simulation, geometric_mean, make_devices

# Without a hierarchy a group's scale is a bfloat16: 8 bits more than here for every 16 coordinates.
# Such rows are run with the scales of this library and half a bit less for everything else.
_FLAT_SCALES = "bf16 group scales, emulated"

# Table of the paper, what a row shows, setting, workers, the paper's vNMSE.
CASES: tuple[tuple[str, str, str, int, float | None], ...] = (
    # Mean over fine-tuning LLaMA-1B for chat; ring, 8 GPUs.
    ("Table 3: methods", "DynamiQ, 5 bits: default here", "dynamiq:5:ring", 8, None),
    ("Table 3: methods", "DynamiQ, 5 bits: paper's preset", "paper:5:ring", 8, 0.00149),
    ("Table 3: methods", "MXFP8", "mxfp8:ring", 8, 0.00320),
    ("Table 3: methods", "MXFP6", "mxfp6:ring", 8, 0.0135),
    ("Table 3: methods", "MXFP4", "mxfp4:ring", 8, 0.111),
    ("Table 3: methods", "THC", "thc:ring", 8, 0.120),
    ("Table 3: methods", "OmniReduce, 8 bits", "omnireduce:ring", 8, 0.080),
    # LLaMA-1B, MMLU.
    ("Table 4: budgets", "3 bits", "paper:3:ring", 8, 0.01603),
    ("Table 4: budgets", "4 bits", "paper:4:ring", 8, 0.00589),
    ("Table 4: budgets", "5 bits", "paper:5:ring", 8, 0.00096),
    ("Table 4: budgets", "6 bits", "paper:6:ring", 8, 0.00059),
    ("Table 4: budgets", "3 bits, default here", "dynamiq:3:ring", 8, None),
    ("Table 4: budgets", "4 bits, default here", "dynamiq:4:ring", 8, None),
    ("Table 4: budgets", "5 bits, default here", "dynamiq:5:ring", 8, None),
    ("Table 4: budgets", "6 bits, default here", "dynamiq:6:ring", 8, None),
    ("Table 5: butterfly", "DynamiQ, ring", "paper:5:ring", 8, 0.00096),
    ("Table 5: butterfly", "DynamiQ, butterfly", "paper:5:butterfly", 8, 0.00067),
    ("Table 5: butterfly", "MXFP8, ring", "mxfp8:ring", 8, 0.00299),
    ("Table 5: butterfly", "MXFP8, butterfly", "mxfp8:butterfly", 8, 0.00203),
    ("Table 5: butterfly", "DynamiQ, butterfly, default", "dynamiq:5:butterfly", 8, None),
    ("Table 5: butterfly", "DynamiQ, all_to_all, default", "dynamiq:5:all_to_all", 8, None),
    # LLaMA-1B chat, 4 bits, each row adds one thing.
    (
        "Table 6: ablation",
        f"uniform, one width ({_FLAT_SCALES})",
        "paper:3.625:widths=(3,):gap_ratio=1:rounding=independent:ring",
        8,
        0.128,
    ),
    (
        "Table 6: ablation",
        "+ non-uniform levels",
        "paper:3.625:widths=(3,):rounding=independent:ring",
        8,
        0.071,
    ),
    ("Table 6: ablation", "+ variable width", "paper:3.5:rounding=independent:ring", 8, 0.020),
    ("Table 6: ablation", "+ hierarchical scale", "paper:4:rounding=independent:ring", 8, 0.014),
    ("Table 6: ablation", "+ correlated rounding", "paper:4:ring", 8, 0.009),
    ("Table 6: ablation", "default preset here", "dynamiq:4:ring", 8, None),
    *(
        ("Workers, 5 bits and MXFP8", f"{name}, n = {n}", f"{setting}:ring", n, None)
        for name, setting in (
            ("default", "dynamiq:5"),
            ("paper's preset", "paper:5"),
            ("MXFP8", "mxfp8"),
        )
        for n in (2, 4, 8, 16, 32, 64)
    ),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    gradients: Path  # that benchmarks.error.dump_gradients wrote
    workers: int = 64  # most workers of a row; the file needs as many
    by_layer: bool = False  # each layer of a real model is a gradient, and so is its embedding
    seeds: int = 1  # rounding seeds that a figure is averaged over
    save: bool = True  # write the result to the file of `output`
    output: Path = files.path_of("paper_tables")


@benchmark("paper_tables")
def main(config: Config) -> Report:
    """Simulate every row."""
    cases = [case for case in CASES if case[3] <= config.workers]
    make_devices(max(workers for *_, workers, _ in cases))
    steps = gradient_files.load(config.gradients)
    if config.by_layer:
        steps = {
            f"{step} {part}".strip(): tree
            for step, of_step in steps.items()
            for part, tree in layers(of_step).items()
        }
    done: dict[tuple[str, int], dict[str, float]] = {}
    results: list[dict[str, Any]] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("Simulating", total=len(cases))
        for of, label, text, workers, paper in cases:
            if (text, workers) not in done:
                done[text, workers] = errors_of(text, workers, steps, config.seeds)
            errors = done[text, workers]
            row = {"table": of, "row": label, "setting": text, "workers": workers}
            results.append(
                row | {"vnmse": errors, "mean": geometric_mean(errors.values()), "paper": paper}
            )
            progress.advance(task)
    return Report(
        results=results,
        shown=[
            as_table(title, [row for row in results if row["table"] == title])
            for title in dict.fromkeys(row["table"] for row in results)
        ],
        options=files.options_of(config) | {"gradients": config.gradients.name},
    )


def layers(gradients: Gradients) -> dict[str, Gradients]:
    """Split a gradient into its layers, whose arrays have equal names, and its embedding."""
    parts: dict[str, Gradients] = {}
    for name, leaf in gradients.items():
        layer = layer_of(name)
        part = "embedding" if layer is None else f"layer {layer}"
        parts.setdefault(part, {})[LAYER.sub("layer", name)] = leaf
    if set(parts) <= {"embedding"}:
        raise SystemExit("--by-layer: no array has a name such as layers.0. Leave it out.")
    return parts


def errors_of(
    setting: str, workers: int, steps: Mapping[str, Gradients], seeds: int
) -> dict[str, float]:
    """Return the vNMSE of a setting on the gradients of every step."""
    compiled: dict[tuple, Simulation] = {}
    errors = {}
    for step, tree in steps.items():
        chosen = of_workers(tree, workers)
        shapes = tuple((name, leaf.shape) for name, leaf in chosen.items())
        if shapes not in compiled:
            compiled[shapes] = Simulation(parse_setting(setting), chosen)
        errors[step] = compiled[shapes](chosen, range(seeds)).vnmse
    return errors


def as_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Make one table. Ratios are to its first row that the paper has."""
    first = next((row for row in rows if row["paper"]), rows[0])
    columns = (
        Column("row", "row"),
        *(Column(step, ("vnmse", step), "{:.2e}") for step in rows[0]["vnmse"]),
        Column("mean", "mean", "{:.2e}"),
        Column("ratio", lambda row: row["mean"] / first["mean"], "{:.3g}"),
        Column("paper", "paper", "{:.2e}"),
        Column("its ratio", lambda row: row["paper"] and row["paper"] / first["paper"], "{:.3g}"),
    )
    return table(title, columns, rows)


if __name__ == "__main__":
    run(main, __doc__)
