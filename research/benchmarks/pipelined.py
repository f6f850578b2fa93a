"""Time of pipelined steps (DeAR) over emulated slow links, beside the times of their parts, and a
timeline of the step that the compiler makes for several H200.

    python -m research.benchmarks.pipelined

Hosts are network namespaces of this machine, which takes root and iproute2. The timeline replays
the schedules in pipelined_h200.json, which `research.benchmarks.pipelined_aot` writes.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.progress import Progress
from rich.table import Table

from benchmarks.emulation.hosts import Hosts, joined_hosts, link_patience
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate

PARTS = ("forward", "passes", "scatter", "gather", "pipelined", "unpipelined")

# Of the replay: a dense matmul on an H200 at about two thirds of its peak, and a NIC for each GPU.
MATMUL_SECONDS = 2 * 8192 * 2048**2 / 600e12
CODEC_SECONDS = 30e-6
LINK_BYTES_PER_SECOND = 200e9 / 8
COLORS = {
    "forward": "#74c0fc",
    "backward": "#1864ab",
    "codec": "#adb5bd",
    "gather": "#ffa94d",
    "scatter": "#d9480f",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rates: tuple[str, ...] = ("100mbit", "200mbit", "1gbit")
    hosts: int = 4
    method: str = "bf16"
    layers: int = 8
    width: int = 512
    rows: int = 1024  # of each host
    bucket_bytes: int = 2**20  # one for each layer
    repeats: int = 5
    timeout: float = 300.0  # seconds without an answer
    measure: bool = True  # else only draw the timeline
    save: bool = True  # write the result to research/benchmarks/results/pipelined.json


def measure(config: Config, done: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time a step and its parts at every rate: a row for each."""
    fields = ("method", "layers", "width", "rows", "bucket_bytes")
    sent = 2 * 4 * config.layers * config.width**2  # at most, by all methods
    given = {name: getattr(config, name) for name in fields}
    with joined_hosts(
        config.hosts, "research.benchmarks.pipelined_host", given, timeout=config.timeout
    ) as hosts:
        for part in PARTS:
            hosts.ask({"do": "compile", "part": part}, f"compiling {part}")
            done(f"compiled {part}")
        return [_at(rate, hosts, config, sent, done) for rate in map(parse_rate, config.rates)]


def _at(
    rate: float, hosts: Hosts, config: Config, sent: int, done: Callable[[str], None]
) -> dict[str, Any]:
    hosts.network.set_rate(rate)
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(config.repeats):
        for part in PARTS:
            answers = hosts.ask(
                {"do": "run", "part": part},
                f"{part} at {format_rate(rate)}",
                patience=link_patience(sent, rate),
            )
            seconds[part].append(max(answer["seconds"] for answer in answers))
            done(f"{part} at {format_rate(rate)}")
    found = {part: statistics.median(times) for part, times in seconds.items()}
    forward, backward = found["forward"], max(0.0, found["passes"] - found["forward"])
    scatter, gather = found["scatter"], found["gather"]
    return {
        "rate": rate,
        "forward": forward,
        "backward": backward,
        "scatter": scatter,
        "gather": gather,
        "pipelined": found["pipelined"],
        "unpipelined": found["unpipelined"],
        "model_serial": forward + backward + scatter + gather,
        "model_unpipelined": forward + max(backward, scatter + gather),
        "model_pipelined": max(forward, gather) + max(backward, scatter),
        "repeats": seconds,
    }


@benchmark("research/pipelined")
def main(config: Config) -> Report:
    """Measure, and draw the timeline."""
    schedules = json.loads(files.path_of("research/pipelined_h200").read_text())["results"]["steps"]
    if not config.measure:
        plot(schedules).savefig(files.path_of("research/pipelined").with_suffix(".png"), dpi=150)
        return Report()
    with Progress(transient=True) as progress:
        total = len(PARTS) * (1 + config.repeats * len(config.rates))
        task = progress.add_task("Measuring", total=total)
        rows = measure(config, lambda text: progress.update(task, advance=1, description=text))
    return Report(results=rows, shown=[as_table(rows)], draw=lambda: plot(schedules))


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Make a table with a line for each part, and a column for each rate."""
    names = ("forward", "backward", "scatter", "gather", "pipelined", "unpipelined")
    names += ("model_serial", "model_unpipelined", "model_pipelined")
    columns = [Column("", lambda name: name.replace("model_", "model: "))]
    columns += [
        Column(format_rate(row["rate"]), lambda name, row=row: format_seconds(row[name]))
        for row in rows
    ]
    return table("Time of a step", columns, names)


def replay(schedule: Sequence[Sequence[Any]], workers: int = 8) -> list[tuple[str, float, float]]:
    """Return bars of a timeline: kind, start and length in seconds.

    Matmuls and kernels run in order. A transfer starts in its turn, if the one before is over. What
    comes behind its end in the schedule waits for it.
    """
    now = link_free = 0.0
    ends: dict[int, float] = {}
    bars = []
    for kind, *rest in schedule:
        if kind == "done":
            now = max(now, ends[rest[0]])
            continue
        if kind in ("forward", "backward", "codec"):
            length = CODEC_SECONDS if kind == "codec" else MATMUL_SECONDS
            bars.append((kind, now, length))
            now += length
            continue
        number, size = rest
        length = size * (workers - 1) / workers / LINK_BYTES_PER_SECOND
        begin = max(now, link_free)
        ends[number] = link_free = begin + length
        bars.append((kind, begin, length))
    return bars


def plot(steps: Sequence[dict[str, Any]]) -> Figure:
    """Draw a step that gathers at its end above a pipelined one, on one time axis."""
    by_kind = {
        row["pipelined"]: row
        for row in steps
        if row["topology"] == "all_to_all" and row["buckets_per_layer"] == 1
    }
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    lengths = {}
    for axis, pipelined in zip(axes, (False, True), strict=True):
        bars = [bar for bar in replay(by_kind[pipelined]["schedule"]) if bar[0] != "other"]
        lengths[pipelined] = end = max(start + length for _, start, length in bars)
        for kind, start, length in bars:
            place = 0 if kind in ("gather", "scatter") else 1
            axis.broken_barh(
                [(1e3 * start, 1e3 * length)], (place + 0.1, 0.8), color=COLORS[kind], lw=0
            )
        axis.axvline(1e3 * end, color="black", lw=1)
        axis.set_yticks([0.5, 1.5], ["network", "GPU"])
        axis.spines[["top", "right", "left"]].set_visible(False)
        name = "pipelined: the gather runs under the next forward pass"
        axis.set_title(name if pipelined else "gather at the end of a step", loc="left")
        axis.text(1e3 * end, 2.05, f"{1e3 * end:.1f} ms", ha="center", va="bottom", fontsize=9)
    axes[1].set_xlabel("ms of a step")
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, list(COLORS), loc="outside lower center", ncols=5, frameon=False)
    return figure


if __name__ == "__main__":
    run(main, __doc__)
