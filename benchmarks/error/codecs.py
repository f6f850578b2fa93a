"""Error of the all-reduce on the gradients of a small language model: vNMSE by preset, bits,
topology, training step and number of workers.

    python -m benchmarks.error.codecs

The gradients are those that 64 workers meet while fine-tuning with the exact mean. Workers are
virtual devices, which run the same program as real ones. Beside vNMSE, which large super-groups
dominate, the table has the mean over super-groups of their relative error.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.small_lm.corpora import load_corpora
from benchmarks.training.small_lm.gradients import gradient_snapshots
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax._measurement.gradient_files import LARGE
from dynamiq_jax._measurement.settings import Setting
from dynamiq_jax._measurement.simulate import Simulation, make_devices
from dynamiq_jax.topologies import resolve_topology
from tests.support import oracle


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    steps: tuple[int, ...] = (20, 100, 200)  # training steps whose gradients are measured
    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)  # numbers of workers, at 5 bits
    bits: tuple[float, ...] = (3.0, 4.0, 5.0, 6.0, 8.0)  # budgets, with 8 workers
    pretrain_steps: int = 240  # steps of pre-training before
    topologies: tuple[str, ...] = ("ring", "butterfly", "all_to_all")  # of the default preset
    seeds: int = 2  # rounding seeds that a figure is averaged over
    save: bool = True  # write the result to benchmarks/results/error.json and .png


def stacked_gradients(config: Config) -> dict[int, np.ndarray]:
    """Return training step to the gradients of all workers, float32 [workers, size]; small leaves
    are left out.
    """
    corpora = load_corpora()
    structure, params = pretrained(corpora, steps=config.pretrain_steps)
    snapshots = gradient_snapshots(
        structure, params, corpora.reference, workers=max(config.workers), steps=config.steps
    )
    result = {}
    for step, tree in snapshots:
        large = [leaf for leaf in jax.tree.leaves(tree) if leaf[0].size >= LARGE]
        result[step] = np.concatenate(
            [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in large], axis=1
        )
    return result


def oracle_vnmse(gradients: np.ndarray, method: dq.DynamiQ, config: Config) -> float:
    """Return the vNMSE of the independent NumPy implementation of the same preset."""
    workers, size = gradients.shape
    layout = method.layout(size, workers)
    allocation, quantizer = layout.allocation, layout.quantizer
    truth = gradients.astype(np.float64).sum(axis=0)
    result = []
    for seed in range(config.seeds):
        kind = oracle.Kind(
            units=layout.units,
            allowed=allocation.widths,
            exponent=allocation.exponent,
            group_size=quantizer.group_size,
            spacing=oracle.Spacing(quantizer.spacing, quantizer.gap_ratio),
            rounding=quantizer.rounding,
            seed=(seed, seed + 1),
        )
        estimate, _ = oracle.all_reduce(oracle.ring, gradients, kind)
        result.append(((estimate - truth) ** 2).sum() / (truth**2).sum())
    return float(np.mean(result))


@benchmark("error")
def main(config: Config) -> Report:
    """Measure every case."""
    make_devices(max(config.workers))
    gradients = stacked_gradients(config)
    presets = {"default": dq.DynamiQ, "paper": dq.DynamiQ.paper}
    cases = [(name, bits, "ring", 8) for name in presets for bits in config.bits]
    by_workers = [("paper", 5.0, "ring", n) for n in config.workers]
    by_workers += [
        ("default", 5.0, topology, n) for topology in config.topologies for n in config.workers
    ]
    cases += [case for case in by_workers if case not in cases]
    results = []
    with Progress(transient=True) as progress:
        task = progress.add_task("Simulating", total=len(cases) * len(config.steps))
        for name, bits, topology, workers in cases:
            method = presets[name](bits=bits)
            setting = Setting(f"{name}:{bits:g}", method, resolve_topology(topology))
            of_workers = {step: {"gradient": all_[:workers]} for step, all_ in gradients.items()}
            simulation = Simulation(setting, next(iter(of_workers.values())))
            for step, chosen in of_workers.items():
                errors = simulation(chosen, range(config.seeds))
                row = {
                    "preset": name,
                    "bits": dq.wire_report(chosen["gradient"][0], workers, method=method).bits,
                    "topology": topology,
                    "workers": workers,
                    "step": step,
                    "vnmse": errors.vnmse,
                    "relative": errors.relative,
                }
                if name == "paper" and workers == 8 and bits == 5:
                    row["oracle_vnmse"] = oracle_vnmse(chosen["gradient"], method, config)
                results.append(row)
                progress.advance(task)
    size = next(iter(gradients.values())).shape[1]
    return Report(
        results=results,
        shown=[as_table(results, config, size)],
        options=files.options_of(config) | {"size": size},
        draw=lambda: plot(results, config),
    )


def as_table(results: list[dict[str, Any]], config: Config, size: int) -> Table:
    """Make a table with a line for each case, and a column for each training step."""
    lines = []
    for start in range(0, len(results), len(config.steps)):
        rows = results[start : start + len(config.steps)]
        lines.append(
            rows[0] | {"cells": [f"{row['vnmse']:.2e} ({row['relative']:.1e})" for row in rows]}
        )
        if "oracle_vnmse" in rows[0]:
            errors = [f"{row['oracle_vnmse']:.2e}" for row in rows]
            lines.append(rows[0] | {"preset": "  NumPy oracle", "cells": errors})
    columns = [Column(name, name) for name in ("preset", "topology")]
    columns += [Column("bits", "bits", "{:.3f}"), Column("workers", "workers")]
    columns += [Column(f"step {step}", ("cells", place)) for place, step in enumerate(config.steps)]
    title = f"vNMSE, {size:,} coordinates (in brackets: mean relative error of a super-group)"
    return table(title, columns, lines)


def plot(results: list[dict[str, Any]], config: Config) -> Figure:
    """Draw the error against bits and against workers, mean over the training steps."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_bits, by_workers = figure.subplots(1, 2)
    lines = [("paper", "ring", "tab:orange")]
    colors = ("tab:blue", "tab:green", "tab:purple")
    lines += [
        ("default", topology, color)
        for topology, color in zip(config.topologies, colors, strict=False)
    ]
    for preset, topology, color in lines:
        of_line = [row for row in results if (row["preset"], row["topology"]) == (preset, topology)]
        by_8 = [row for row in of_line if row["workers"] == 8] if topology == "ring" else []
        at_5 = [row for row in of_line if abs(row["bits"] - 5) < 0.1]
        for axes, key, rows in ((by_bits, "bits", by_8), (by_workers, "workers", at_5)):
            points: dict[float, list[float]] = {}
            for row in rows:
                points.setdefault(round(row[key], 1), []).append(row["vnmse"])
            if points:
                xs = sorted(points)
                means = [np.exp(np.mean(np.log(points[x]))) for x in xs]
                axes.plot(xs, means, "o-", color=color, label=f"{preset}, {topology}")
    by_bits.set(
        xlabel="bits per coordinate on the wire", ylabel="vNMSE", yscale="log", title="8 workers"
    )
    by_workers.set(xlabel="workers", xscale="log", yscale="log", title="5 bits")
    by_workers.set_xticks(config.workers, [str(n) for n in config.workers], minor=False)
    by_workers.minorticks_off()
    for axes in (by_bits, by_workers):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle("Error of the all-reduce on gradients of a small language model")
    return figure


if __name__ == "__main__":
    run(main, __doc__)
