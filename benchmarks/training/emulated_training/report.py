"""Record of runs for the JSON file, tables and a plot."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.harness.columns import Column, table
from benchmarks.training.emulated_training.rounds import parse_rounds
from benchmarks.training.emulated_training.run import EmulatedRun
from benchmarks.training.emulated_training.target import FRACTIONS, reached, target_loss
from dynamiq_jax._console.units import format_rate, format_seconds
from dynamiq_jax._measurement.settings import BF16_RING, PSUM, parse_setting

TARGET = (
    "the evaluation loss at which the exact run (psum) has made 99 % (99.5 %) of its way from the "
    "loss of the pre-trained weights to the lowest it has; reached where the lowest loss of a run "
    "so far crosses it, interpolated between evaluations; null: not reached"
)
# Of its time to the target, what DynamiQ saves in arXiv 2602.08923.
PAPER = {"bf16": 0.408, "mxfp8": 0.345}
REFERENCES = {"bf16": BF16_RING, "mxfp8": "mxfp8:ring"}
LEGEND = {"loc": "outside right center", "frameon": False, "fontsize": "small"}
COLORS = {
    "psum": "tab:gray",
    "bf16": "tab:orange",
    "mxfp8": "tab:green",
    "blockint": "tab:brown",
    "thc": "tab:purple",
    "dynamiq:4": "tab:cyan",
    "dynamiq:5": "tab:blue",
    "dynamiq:6": "midnightblue",
}


def summary(
    runs: Sequence[EmulatedRun], costs: dict[str, dict[str, float]], compute_seconds: float
) -> dict[str, Any]:
    """Return the record of all runs so far.

    Args:
      runs: all runs; the first one's link and seed are those that were evaluated on the way.
      costs: bits of a coordinate and bytes that each host sends in a step, by setting.
      compute_seconds: of a step without the all-reduce.
    """
    first = runs[0]
    evaluated = {r.setting: r for r in runs if (r.rate, r.seed) == (first.rate, first.seed)}
    exact = next(r for r in evaluated.values() if r.setting == PSUM)
    targets = {f: target_loss(list(exact.losses.values()), f) for f in FRACTIONS}
    timed = [run for run in runs if run.rate is not None]
    links = [_on_link(run, evaluated[run.setting], targets, costs) for run in timed]
    for row in links:
        row["compute_share"] = compute_seconds / row["step_seconds"]
        row["times_sooner"] = {
            name: _times_sooner(row, reference, links) for name, reference in REFERENCES.items()
        }
    return {
        "target": TARGET,
        "targets": targets,
        "compute_seconds": compute_seconds,  # of a step without the all-reduce, all hosts at once
        "same_bits_on_all_hosts": True,  # or there would be no result
        "same_bits_on_all_links": True,
        "links": links,
        "curves": [
            {"setting": name, "seed": run.seed, "losses": run.losses, "accuracies": run.accuracies}
            for name, run in evaluated.items()
        ],
        "final_losses": _final_losses(runs, list(evaluated)),
        "saved_in_the_paper": PAPER,
    }


def _on_link(
    run: EmulatedRun,
    evaluated: EmulatedRun,
    targets: dict[float, float],
    costs: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Return the times of one setting on one link."""
    steps, losses = list(evaluated.losses), list(evaluated.losses.values())
    at = [run.clock(step) for step in steps]
    wire = 8 * costs[run.setting]["bytes_a_step"] / (run.rate or np.inf)
    return {
        "rate": run.rate,
        "setting": run.setting,
        **costs[run.setting],
        "step_seconds": run.step_seconds,
        "wire_seconds": wire,  # of a step: its bytes at the rate, nothing else
        "seconds": dict(zip(steps, at, strict=True)),  # of training, by steps taken
        "to_target": {
            fraction: {"seconds": reached(at, losses, loss), "steps": reached(steps, losses, loss)}
            for fraction, loss in targets.items()
        },
    }


def _times_sooner(
    row: dict[str, Any], reference: str, links: Iterable[dict[str, Any]]
) -> dict[float, float]:
    """Return by target, where both get there, how many times sooner than a reference on the same
    link.
    """
    for other in links:
        same_link = other["rate"] == row["rate"]
        if same_link and _is(other["setting"], reference) and other is not row:
            return {
                fraction: other["to_target"][fraction]["seconds"] / mine["seconds"]
                for fraction, mine in row["to_target"].items()
                if mine["seconds"] and other["to_target"][fraction]["seconds"]
            }
    return {}


def _final_losses(runs: Sequence[EmulatedRun], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Return the evaluation loss after all steps, by seed, also relative to the exact run's."""
    last = max(runs[0].losses)
    by_seed: dict[str, dict[int, float]] = {name: {} for name in settings}
    for run in runs:
        if last in run.losses:
            by_seed[run.setting][run.seed] = run.losses[last]
    rows = []
    for name, losses in by_seed.items():
        off = {seed: loss / by_seed[PSUM][seed] - 1 for seed, loss in losses.items()}
        mean = float(np.mean(list(off.values())))
        rows.append({"setting": name, "losses": losses, "off": off, "mean_off": mean})
    return rows


def as_tables(results: dict[str, Any]) -> list[Table]:
    """Make one table for each link, and one of the final losses."""
    columns = (
        Column("setting", "setting"),
        Column("bits", "bits", "{:.2f}"),
        Column("step", lambda row: format_seconds(row["step_seconds"])),
        Column("wire alone", lambda row: row["wire_seconds"] / row["step_seconds"], "{:.0%}"),
        Column("computing", "compute_share", "{:.0%}"),
        Column("99 %", lambda row: _when(row["to_target"][0.99]["seconds"])),
        *(
            Column(
                f"vs {name.upper()}",
                lambda row, name=name: row["times_sooner"][name].get(0.99),
                "{:.2f}x",
            )
            for name in REFERENCES
        ),
        Column("99.5 %", lambda row: _when(row["to_target"][0.995]["seconds"])),
    )
    made = [
        table(
            f"{format_rate(rate)}: time until the exact run's target",
            columns,
            [row for row in results["links"] if row["rate"] == rate],
            "wire alone: share of a step that its bytes take at the rate. computing: share that "
            "a step without the all-reduce takes.",
        )
        for rate in dict.fromkeys(row["rate"] for row in results["links"])
    ]
    final = (
        Column("setting", "setting"),
        Column("loss by seed", lambda row: _each(row["losses"], ".4f")),
        Column("off exact", lambda row: _each(row["off"], "+.2%")),
        Column("mean", "mean_off", "{:+.2%}"),
    )
    return [*made, table("Evaluation loss after training", final, results["final_losses"])]


def _each(by_seed: dict[int, float], form: str) -> str:
    return "  ".join(f"{value:{form}}" for value in by_seed.values())


def plot(results: dict[str, Any]) -> Figure:
    """Draw loss against time on every link and, below, the time that DynamiQ saves."""
    rates = list(dict.fromkeys(row["rate"] for row in results["links"]))
    figure = Figure(figsize=(1.6 + 4 * max(2, len(rates)), 7.5), layout="constrained")
    above, below = figure.subfigures(2, height_ratios=(1.2, 1))
    curves = {curve["setting"]: curve for curve in results["curves"]}
    for axis, rate in zip(above.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        for row in results["links"]:
            if row["rate"] == rate:
                losses = curves[row["setting"]]["losses"]
                axis.plot(
                    [row["seconds"][step] for step in losses],
                    list(losses.values()),
                    label=row["setting"],
                    **_style(row["setting"]),
                )
        axis.axhline(results["targets"][0.99], color="black", lw=0.8, ls=":", label="99 % target")
        axis.set(title=format_rate(rate), xlabel="training time (s)", xlim=(0, None))
        axis.grid(alpha=0.3)
        if rate == rates[0]:
            axis.set_ylabel("evaluation loss (nats a token)")
            above.legend(*axis.get_legend_handles_labels(), **LEGEND)
    settings = {row["setting"] for row in results["links"]}
    names = [name for name, of in REFERENCES.items() if any(_is(each, of) for each in settings)]
    axes = below.subplots(1, max(1, len(names)), squeeze=False)[0]
    for axis, name in zip(axes, names or ["bf16"], strict=True):
        _draw_saved(axis, name, results["links"], rates)
    below.legend(*axis.get_legend_handles_labels(), **LEGEND)
    return figure


def _draw_saved(axis: Any, name: str, links: list[dict[str, Any]], rates: list[float]) -> None:
    """Draw the share of a reference's time to the 99 % target that DynamiQ saves, in bars."""
    settings = [s for s in dict.fromkeys(r["setting"] for r in links) if s.startswith("dynamiq")]
    width = 0.8 / max(1, len(settings))
    for index, setting in enumerate(settings):
        rows = [row for row in links if row["setting"] == setting]
        ratios = [row["times_sooner"][name].get(0.99, np.nan) for row in rows]
        places = [rates.index(row["rate"]) + (index + 0.5) * width - 0.4 for row in rows]
        style = {"hatch": "//", "edgecolor": "white"} if _is_dashed(setting) else {}
        saved = [100 * (1 - 1 / ratio) for ratio in ratios]
        axis.bar(places, saved, width, color=_color(setting), label=setting, **style)
    percent = 100 * PAPER[name]
    axis.axhline(percent, color="tab:red", ls="--", label="the paper")
    axis.set_xticks(range(len(rates)), [format_rate(rate) for rate in rates])
    axis.set(title=f"Time to the 99 % target saved over {name.upper()}", ylabel="%")
    axis.grid(alpha=0.3, axis="y")


def _style(setting: str) -> dict[str, Any]:
    return {"color": _color(setting), "ls": "--" if _is_dashed(setting) else "-", "lw": 1.4}


def _color(setting: str) -> str:
    rounds = parse_rounds(setting)
    if rounds.every is not None:
        return "tab:red" if rounds.times > 1 else "tab:pink"
    return next((c for name, c in COLORS.items() if setting.startswith(name)), "black")


def _is_dashed(setting: str) -> bool:
    rounds = parse_rounds(setting)
    routes = (None, parse_setting(BF16_RING).topology)
    return rounds.every is not None or rounds.setting.topology not in routes


def _is(setting: str, reference: str) -> bool:
    """Return whether a setting is an all-reduce in every step that does the same as another."""
    rounds = parse_rounds(setting)
    return rounds.every is None and rounds.setting == parse_setting(reference)


def _when(seconds: float | None) -> str:
    return "not reached" if seconds is None else format_seconds(seconds)
