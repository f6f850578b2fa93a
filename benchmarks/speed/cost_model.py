"""The cost model against an emulated network, and its predictions for larger ones.

    python -m benchmarks.speed.cost_model

Measures all-reduces over several numbers of hosts and rates with `python -m benchmarks.emulation`
(root and iproute2), or takes the JSON files of earlier runs. Codec speeds, the latency, the
efficiency of the link and how much slower it is for each topology that talks to more than
neighbours (gloo halves the speed of partners that exchange) are fitted to the points of all rates
but one; every point is predicted, those of the rate that was left out too. Then the model simulates
8 to 8192 workers of an accelerator on links of 1 to 400 Gbit/s.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table
from scipy import optimize

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement.settings import parse_setting
from dynamiq_jax._prediction.cost_model import CodecSpeed, Network, predict, predict_exact
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS, SUM_SPEEDS
from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring, Topology

TOPOLOGIES: dict[str, Topology] = {
    "ring": Ring(),
    "butterfly": Butterfly(),
    "all_to_all": AllToAll(),
}
FREE = CodecSpeed(ns_per_coordinate=0.0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    measured: tuple[Path, ...] = ()  # JSON of `benchmarks.emulation`; measured now if empty
    hosts: tuple[int, ...] = (4, 8)  # to measure
    rates: tuple[str, ...] = ("100mbit", "200mbit", "1gbit")  # to measure
    settings: tuple[str, ...] = (  # to measure
        "psum",
        "bf16:ring",
        "dynamiq:5:ring",
        "dynamiq:5:butterfly",
        "dynamiq:5:all_to_all",
        "dynamiq:4:ring",
    )
    size: str = "8Mi"  # coordinates to measure
    repeats: int = 5  # timed calls, to measure
    left_out: float = 2e8  # bits a second: predicted, but not fitted to
    coordinates: int = 10**9  # gradient of the simulated workers
    tolerance: float = 0.15  # largest error of a prediction, with which the status is 0
    save: bool = True  # write the result to benchmarks/results/cost_model.json and .png


def measure(config: Config) -> dict[str, Any]:
    """Run `python -m benchmarks.emulation` and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.json"
        command = [sys.executable, "-m", "benchmarks.emulation", "--json", str(path)]
        command += ["--hosts", *map(str, config.hosts), "--rate", *config.rates]
        command += ["--settings", *config.settings, "--size", config.size]
        subprocess.run([*command, "--repeats", str(config.repeats)], check=True)
        return json.loads(path.read_text())


# ------------------------------------------------------------------------------- the fit


def kind(row: dict[str, Any]) -> str:
    """Return the method of a row, which has a codec speed of its own."""
    return row["setting"].split(":")[0]


def wire_seconds(row: dict[str, Any], **network: float) -> float:
    """Predict the seconds of the wire alone for a measured setting."""
    setting = parse_setting(row["setting"])
    link = Network(
        gbit_per_s=row["rate"] / 1e9, **{"latency_us": 0.0, "efficiency": 1.0, **network}
    )
    size, hosts = row["size"], row["hosts"]
    if setting.method is None:
        return predict_exact(size, hosts, network=link, codec=FREE).wire
    topology = setting.topology
    cost = setting.method.wire_cost(Call(size=size, axis=Axis("", hosts), topology=topology))
    return predict(size, hosts, topology, cost, link, FREE).wire


def far_topology(row: dict[str, Any]) -> str | None:
    """Return the name of a setting's topology, if workers send to others than their neighbors."""
    topology = parse_setting(row["setting"]).topology
    return topology and next(
        (name for name, known in TOPOLOGIES.items() if known == topology and known.is_far), None
    )


def design(rows: list[dict[str, Any]], kinds: list[str], fars: list[str], cores: int) -> np.ndarray:
    """Return the coefficients of the fit, [rows, kinds + 2 + fars]: of codec speeds (ns), latency
    (us), time of the wire over bytes at the rate, and its excess on each far topology.
    """
    matrix = np.zeros((len(rows), len(kinds) + 2 + len(fars)))
    for row, line in zip(rows, matrix, strict=True):
        wire = wire_seconds(row)
        # All hosts share the cores of this machine.
        line[kinds.index(kind(row))] = 1e-9 * row["size"] * row["hosts"] / cores
        line[len(kinds) : len(kinds) + 2] = wire_seconds(row, latency_us=1.0) - wire, wire
        if (far := far_topology(row)) is not None:
            more = wire_seconds(row, oversubscription=2.0) - wire
            line[len(kinds) + 2 + fars.index(far)] = more
    return matrix


def fit_and_predict(
    rows: list[dict[str, Any]], config: Config, cores: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return fitted parameters, and rows with the predicted seconds beside the measured ones."""
    kinds = sorted({kind(row) for row in rows})
    seconds = np.array([row["seconds"] for row in rows])
    fars = sorted({far for row in rows if (far := far_topology(row)) is not None})
    matrix = design(rows, kinds, fars, cores)
    fitted = np.array([row["rate"] != config.left_out for row in rows])
    # Relative errors count alike, and no part of a time is negative.
    solution, _ = optimize.nnls(matrix[fitted] / seconds[fitted, None], np.ones(fitted.sum()))
    speeds, (latency, wire, *more) = solution[: len(kinds)], solution[len(kinds) :]
    parameters = {
        f"{name}_ns_per_coordinate": float(speed) for name, speed in zip(kinds, speeds, strict=True)
    }
    parameters |= {"latency_us": float(latency), "efficiency": float(1 / wire)}
    parameters |= {
        f"oversubscription_{far}": float(1 + extra / wire)
        for far, extra in zip(fars, more, strict=True)
    }
    results = [
        row | {"predicted": float(p), "off": float(p / row["seconds"] - 1), "fitted": bool(f)}
        for row, p, f in zip(rows, matrix @ solution, fitted, strict=True)
    ]
    return parameters, results


# ------------------------------------------------------------------------- the simulation


def simulate(config: Config) -> list[dict[str, Any]]:
    """Predict all-reduce times of large clusters, and the speed-up over bfloat16 sums."""
    rows = []
    method = dq.DynamiQ()
    for gbit in (1, 10, 25, 100, 200, 400):
        network = Network(gbit_per_s=gbit, latency_us=20.0)
        for workers in (8, 64, 512, 8192):
            plain = predict_exact(
                config.coordinates, workers, network=network, codec=SUM_SPEEDS["gpu"], item_bytes=2
            )
            for name, topology in TOPOLOGIES.items():
                size, axis = config.coordinates, Axis("", workers)
                cost = method.wire_cost(Call(size=size, axis=axis, topology=topology))
                time = predict(size, workers, topology, cost, network, CODEC_SPEEDS["gpu"])
                rows.append(
                    {
                        "gbit_per_s": gbit,
                        "workers": workers,
                        "topology": name,
                        "seconds": time.total,
                        "codec_seconds": time.codec,
                        "speedup_over_bf16_psum": plain.total / time.total,
                    }
                )
    return rows


# ------------------------------------------------------------------------------- reports


FIT_COLUMNS = (
    Column("hosts", "hosts"),
    Column("rate", lambda row: row["rate"] / 1e6, "{:g} Mbit/s"),
    Column("setting", "setting"),
    Column("measured", lambda row: 1e3 * row["seconds"], "{:.0f} ms"),
    Column("predicted", lambda row: 1e3 * row["predicted"], "{:.0f} ms"),
    Column("off", lambda row: 100 * row["off"], "{:+.1f} %"),
    Column("", lambda row: "" if row["fitted"] else "not fitted"),
)


def simulation_table(rows: list[dict[str, Any]]) -> Table:
    """Make a table of the speed-up over bfloat16 sums, by link and workers."""
    lines: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        line = lines.setdefault((row["gbit_per_s"], row["topology"]), {})
        line[row["workers"]] = row["speedup_over_bf16_psum"]
    columns = [Column("link", (0, 0), "{} Gbit/s"), Column("topology", (0, 1))]
    columns += [
        Column(f"{n} workers", (1, n), "{:.2f}") for n in sorted({row["workers"] for row in rows})
    ]
    title = "5 bits: times faster than psum of bf16 (simulated)"
    return table(title, columns, list(lines.items()))


def plot(rows: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> Figure:
    """Draw predicted against measured times, and the simulated speed-ups of two topologies."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    fit, scale = figure.subplots(1, 2)
    colors = {"psum": "tab:gray", "bf16": "tab:orange", "dynamiq": "tab:blue"}
    for row in rows:
        fit.plot(
            1e3 * row["seconds"],
            1e3 * row["predicted"],
            "o" if row["fitted"] else "D",
            color=colors.get(kind(row), "black"),
            fillstyle="full" if row["fitted"] else "none",
        )
    ends = np.array([min(r["seconds"] for r in rows), max(r["seconds"] for r in rows)]) * 1e3
    fit.plot(ends, ends, color="black", linewidth=0.8)
    fit.fill_between(ends, ends * 0.85, ends * 1.15, alpha=0.15, color="black", linewidth=0)
    fit.set(
        xlabel="measured (ms)",
        ylabel="predicted (ms)",
        xscale="log",
        yscale="log",
        title="Emulated hosts (band: 15 %; open: rate not fitted)",
    )
    ticks = [tick for tick in (100, 200, 500, 1000, 2000, 5000) if ends[0] * 0.9 < tick < ends[1]]
    for axis in (fit.xaxis, fit.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
    fit.minorticks_off()
    for name, color in colors.items():
        fit.plot([], [], "o", color=color, label=name)
    for gbit, color in ((10, "tab:green"), (100, "tab:blue"), (400, "tab:red")):
        for name, style in (("ring", "--"), ("all_to_all", "-")):
            chosen = [r for r in simulated if (r["gbit_per_s"], r["topology"]) == (gbit, name)]
            scale.plot(
                [r["workers"] for r in chosen],
                [r["speedup_over_bf16_psum"] for r in chosen],
                style,
                color=color,
                label=f"{gbit} Gbit/s, {name}",
            )
    scale.set(xscale="log", xlabel="workers", title="Simulated: times faster than psum of bf16")
    scale.set_ylim(bottom=0)
    for axes in (fit, scale):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    return figure


@benchmark("cost_model")
def main(config: Config) -> Report:
    """Measure, fit and simulate; the status is 1 if a prediction is too far off."""
    records = [json.loads(path.read_text()) for path in config.measured] or [measure(config)]
    measured = [row for record in records for row in record["results"]]
    cores = records[0]["environment"]["cores"]
    parameters, rows = fit_and_predict(measured, config, cores)
    worst = max(abs(row["off"]) for row in rows)
    simulated = simulate(config)
    return Report(
        results={
            "network": [record["environment"] for record in records],
            "parameters": parameters,
            "points": rows,
            "simulation": simulated,
        },
        shown=[
            table("All-reduce, measured and predicted", FIT_COLUMNS, rows),
            ", ".join(f"{name} {value:.2f}" for name, value in parameters.items()),
            f"Furthest off: {100 * worst:.1f} %",
            simulation_table(simulated),
        ],
        options=files.options_of(config) | {"measured": len(config.measured)},
        draw=lambda: plot(rows, simulated),
        status=int(worst > config.tolerance),
    )


if __name__ == "__main__":
    run(main, __doc__)
