"""Error of each topology on 2 to 8192 workers: simulated as far as memory goes, and by the law of
`Topology.error_growth` beyond.

    python -m benchmarks.error.error_law

Gradients are synthetic: rows of lognormal magnitude, a share of whose energy all workers have in
common. The law has one number to fit, the error of one compression: the geometric mean over all
that was simulated.
"""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.progress import track
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax._measurement.settings import Setting
from dynamiq_jax._measurement.simulate import Simulation, make_devices
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring, Topology
from pallas_kernels.codec import SUPER_GROUP_SIZE

TOPOLOGIES: dict[str, Topology] = {
    "ring": Ring(),
    "butterfly": Butterfly(),
    "all_to_all": AllToAll(),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    simulated: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)  # workers
    beyond: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)  # workers, by the law alone
    agreements: tuple[float, ...] = (0.0, 0.1)  # share of the energy that workers have in common
    rows_per_chunk: int = 64  # of 256 coordinates
    bits: float = 5.0  # on the wire
    rounding: str = "correlated"  # of DynamiQ; the law takes roundings as independent
    save: bool = True  # write the result to benchmarks/results/error_law.json and .png


def simulate(stacked: np.ndarray, name: str, config: Config) -> float:
    """Return the vNMSE of the sum of all rows on a topology."""
    method = dq.DynamiQ(bits=config.bits, rounding=config.rounding)
    gradients = {"gradient": stacked}
    return Simulation(Setting(name, method, TOPOLOGIES[name]), gradients)(gradients, (0,)).vnmse


def measure(config: Config) -> list[dict[str, Any]]:
    """Return a row for each agreement, topology and number of workers."""
    rows = []
    for agreement in config.agreements:
        errors: dict[tuple[str, int], float] = {}
        for workers in track(config.simulated, f"agreement {agreement:g}", transient=True):
            # Few workers get larger chunks: of few rows, one heavy one would decide everything.
            size = SUPER_GROUP_SIZE * config.rows_per_chunk * max(workers, 32)
            stacked = worker_gradients(workers, size, 0, agreement=agreement)
            for name in TOPOLOGIES:
                errors[name, workers] = simulate(stacked, name, config)
        ones = [
            error / TOPOLOGIES[name].error_growth(workers, agreement=agreement)
            for (name, workers), error in errors.items()
        ]
        one = float(np.exp(np.mean(np.log(ones))))
        for name, topology in TOPOLOGIES.items():
            for workers in (*config.simulated, *config.beyond):
                growth = topology.error_growth(workers, agreement=agreement)
                rows.append(
                    {
                        "agreement": agreement,
                        "topology": name,
                        "workers": workers,
                        "vnmse": errors.get((name, workers)),
                        "law": one * growth,
                    }
                )
    return rows


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Make a table of simulated errors and, in brackets, those of the law."""
    lines: dict[tuple[float, int], dict[str, str]] = {}
    for row in rows:
        simulated = "" if row["vnmse"] is None else f"{row['vnmse']:.2e} "
        line = lines.setdefault((row["agreement"], row["workers"]), {})
        line[row["topology"]] = f"{simulated}({row['law']:.1e})"
    columns = [
        Column("agreement", (0, 0), "{:g}"),
        Column("workers", (0, 1)),
        *(Column(name, (1, name)) for name in TOPOLOGIES),
    ]
    return table("vNMSE, simulated (by the law)", columns, sorted(lines.items()))


def plot(rows: list[dict[str, Any]], config: Config) -> Figure:
    """Draw simulated errors as dots, the law as lines."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(config.agreements), squeeze=False)
    for axes, agreement in zip(panels[0], config.agreements, strict=True):
        for name, color in zip(TOPOLOGIES, ("tab:blue", "tab:green", "tab:purple"), strict=True):
            line = [r for r in rows if (r["agreement"], r["topology"]) == (agreement, name)]
            dots = [r for r in line if r["vnmse"] is not None]
            axes.plot([r["workers"] for r in line], [r["law"] for r in line], color=color)
            axes.plot(
                [r["workers"] for r in dots],
                [r["vnmse"] for r in dots],
                "o",
                color=color,
                label=name,
            )
        axes.set(xscale="log", yscale="log", xlabel="workers", title=f"agreement {agreement:g}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panels[0][0].set_ylabel(f"vNMSE, {config.bits:g} bits")
    return figure


@benchmark("error_law")
def main(config: Config) -> Report:
    """Simulate every case."""
    make_devices(max(config.simulated))
    rows = measure(config)
    return Report(results=rows, shown=[as_table(rows)], draw=lambda: plot(rows, config))


if __name__ == "__main__":
    run(main, __doc__)
