"""Options and tables of `python -m benchmarks.emulation`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.emulation import namespaces
from benchmarks.emulation.network import NetworkRun, Row
from benchmarks.harness.columns import Column, table
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.environment import environment
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import (
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_size,
)
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._measurement.settings import BF16_RING, DEFAULTS, PSUM, parse_settings


@dataclasses.dataclass(frozen=True)
class Emulation:
    """All-reduce over hosts emulated on this machine, on slow links (needs root and iproute2).

    Every host is a network namespace with one process and a link limited in both directions; the
    processes are joined by jax.distributed over gloo. Each setting is measured in turns in the same
    processes, first without a limit and then at every rate.

    All hosts share the cores of this machine: with N hosts on C cores, codec time counts about N/C
    times over, so a real network of such hosts does better. XLA gets C/N threads in each, at least
    one. Links have no delay but their queues.
    """

    hosts: tuple[int, ...] = (4,)
    """How many hosts; several numbers are measured one after the other."""

    rate: tuple[str, ...] = ("200mbit",)
    """Rate of every link, as tc spells it: 200mbit, 1gbit."""

    settings: tuple[str, ...] = DEFAULTS
    """psum, which is jax.lax.psum, or [ef+|gc+|ef21m+]METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]... The
    error of a wrong one lists the possible ones."""

    size: str = "8Mi"
    """Float32 coordinates of the gradient: 4096, 1M (10**6), 8Mi (8 * 2**20)."""

    repeats: int = 5
    """Timed calls of each setting at each rate. The median counts."""

    timeout: float = 120.0
    """Seconds without an answer, beyond what the link takes, after which everything is ended."""

    seed: int = 0
    """Chooses gradients and rounding."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything that was measured, with versions and hardware, to this file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw the times to this file (.png, .svg or .pdf)."""

    def run(self) -> int:
        """Measure and report; return the exit status."""
        settings = parse_settings(self.settings)
        rates = [parse_rate(text) for text in self.rate]
        size = parse_size(self.size, "--size")
        options.check_range("--repeats", self.repeats, 1)
        options.check_range("--timeout", self.timeout, 1)
        options.check_range("--seed", self.seed, 0, options.MAX_SEED)
        for count in self.hosts:
            if not 2 <= count <= namespaces.MAX_HOSTS:
                raise CommandError(f"--hosts: {count}: give 2 to {namespaces.MAX_HOSTS}.")
        options.check_outputs(self.json, self.plot)
        jax.config.update("jax_platforms", "cpu")  # as the hosts' processes have it
        measuring = {"repeats": self.repeats, "seed": self.seed}
        runs = [
            NetworkRun(settings, count, size=size, timeout=self.timeout, **measuring)
            for count in self.hosts
        ]
        namespaces.check_possible()
        console = tables.console()
        removed = namespaces.remove_stale()
        if removed:
            console.print(f"removed {len(removed)} namespaces of killed runs", highlight=False)
        rows: list[Row] = []
        facts: Row = {}
        for run in runs:
            with tables.progress(
                console, f"{run.num_hosts} hosts", run.steps(len(rates))
            ) as advance:
                facts, measured = run.measure(rates, advance)
            for rate in rates:
                console.print(_table([row for row in measured if row["rate"] == rate]))
            rows += measured
        if self.json is not None:
            device = facts.pop("device")
            del facts["threads"]  # of which hosts of other numbers have others: rows have them
            records.write(self.json, environment(device) | facts, dataclasses.asdict(self), rows)
        if self.plot is not None:
            _plot(self.plot, rows)
        return tables.warn_unequal(console, rows)


def _table(rows: Sequence[Row]) -> Table:
    """Make the table of one rate."""
    row = rows[0]
    columns = (
        Column("setting", "setting"),
        Column("time", lambda row: format_seconds(row["seconds"])),
        Column("wire alone", lambda row: format_seconds(row["wire_seconds"])),
        Column("time / wire", "times_wire", "{:.2f}"),
        Column("unlimited link", lambda row: format_seconds(row["local_seconds"])),
        Column("vs psum", lambda row: row["speedup"].get(PSUM), "{:.2f}x"),
        Column("vs BF16", lambda row: row["speedup"].get(BF16_RING), "{:.2f}x"),
        Column("sent by each", lambda row: format_bytes(row["bytes_per_worker"])),
        Column("on interface", "overhead", "x {:.3f}"),
        Column("vNMSE", "vnmse", "{:.1e}"),
    )
    return table(
        f"{row['hosts']} hosts at {format_rate(row['rate'])}, {format_size(row['size'])} float32 "
        "coordinates",
        columns,
        rows,
        "wire alone: the bytes sent at the rate. unlimited link: codec, memory and TCP of all "
        "hosts on this machine's cores. on interface: with headers and acknowledgements.",
    )


def _plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw the seconds of each number of hosts and rate as bars."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        label = f"{row['hosts']} hosts, {format_rate(row['rate'])}"
        groups.setdefault(label, {})[row["setting"]] = row["seconds"]
    height = sum(0.9 + 0.3 * len(bars) for bars in groups.values())
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axis, (label, bars) in zip(axes, groups.items(), strict=True):
        drawn = axis.barh(list(bars), [1e3 * s for s in bars.values()], color="#1864ab")
        axis.bar_label(drawn, [format_seconds(s) for s in bars.values()], padding=3)
        axis.invert_yaxis()
        axis.set_title(label, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[-1].set_xlabel("time of one all-reduce (ms)")
    figure.savefig(path, dpi=150)
