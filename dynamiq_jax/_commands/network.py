"""`dynamiq-jax network`: all-reduce over hosts that are emulated on this machine."""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.table import Table

from dynamiq_jax._workshop import namespaces, tables
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.joining import START_TIMEOUT
from dynamiq_jax._workshop.measure import check_seed
from dynamiq_jax._workshop.processes import Workers, python_command, python_environment
from dynamiq_jax._workshop.settings import (
    BF16_RING,
    DEFAULTS,
    PSUM,
    Setting,
    is_same,
    parse_settings,
)
from dynamiq_jax._workshop.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_size,
)

_PORT = 9876  # of the coordinator; free in every fresh namespace


@dataclasses.dataclass(frozen=True)
class Network:
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
    """METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]; psum is jax.lax.psum. A wrong one lists the
    possible ones."""

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
        """Measures and reports; returns the exit status."""
        settings = parse_settings(self.settings)
        rates = [parse_rate(text) for text in self.rate]
        size = parse_size(self.size, "--size")
        for name, low in (("repeats", 1), ("timeout", 1)):
            if getattr(self, name) < low:
                raise CommandError(f"--{name} is {getattr(self, name)}: give at least {low}.")
        check_seed(self.seed)
        for count in self.hosts:
            if not 2 <= count <= namespaces.MAX_HOSTS:
                raise CommandError(f"--hosts: {count}: give 2 to {namespaces.MAX_HOSTS}.")
        tables.check_outputs(self.json, self.plot)
        jax.config.update("jax_platforms", "cpu")  # as the hosts' processes have it
        runs = [_Run(self, settings, size, count) for count in self.hosts]
        namespaces.check_possible()
        console = tables.console()
        removed = namespaces.remove_stale()
        if removed:
            console.print(f"removed {len(removed)} namespaces of killed runs", highlight=False)
        rows: list[dict[str, Any]] = []
        device = ""
        for run in runs:
            steps = len(settings) * (1 + (1 + len(rates)) * (1 + self.repeats))
            with tables.progress(console, f"{run.num_hosts} hosts", steps) as advance:
                device, found = run.measure(rates, advance)
            for rate in rates:
                at_rate = [row for row in found if row["rate"] == rate]
                console.print(network_table(at_rate))
            rows += found
        tables.save_json(self.json, device, dataclasses.asdict(self), rows)
        tables.save_plot(self.plot, "time of one all-reduce", _series(rows))
        return tables.warn_unequal(console, rows)


class _Run:
    """One number of hosts, in one set of processes."""

    def __init__(self, options: Network, settings: Sequence[Setting], size: int, num_hosts: int):
        self._options, self._settings, self._size = options, settings, size
        self.num_hosts = num_hosts
        self._largest = max(s.wire_report(size, num_hosts).bytes_per_worker for s in settings)

    def measure(
        self, rates: Sequence[float], advance: Callable[[str], None]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Kind of the devices, and a row for every rate and setting."""
        self._advance = advance
        with namespaces.emulated(self.num_hosts) as network:
            commands = [self._command(network, host) for host in range(self.num_hosts)]
            with Workers(commands, python_environment(self.num_hosts)) as workers:
                self._network, self._workers = network, workers
                joined = workers.ask({"do": "join"}, timeout=START_TIMEOUT, doing="joining")
                checks = {setting.name: self._compile(setting) for setting in self._settings}
                local = self._timed(None)
                rows = [
                    self._row(setting, rate, timed[setting.name], local[setting.name])
                    | checks[setting.name]
                    for rate in rates
                    for timed in [self._timed(rate)]
                    for setting in self._settings
                ]
                self._ask({"do": "stop"}, "stopping")
        for row in rows:
            row["speedup"] = _speedups(row, rows)
        return joined[0]["device"], rows

    def _command(self, network: namespaces.Network, host: int) -> list[str]:
        config = {
            "parent": os.getpid(),
            "coordinator": f"{network.address(0)}:{_PORT}",
            "num_hosts": self.num_hosts,
            "host": host,
            "size": self._size,
            "seed": self._options.seed,
        }
        return network.command(
            host, python_command("dynamiq_jax._workshop.worker", json.dumps(config))
        )

    def _ask(
        self, request: dict[str, Any], doing: str, rate: float | None = None
    ) -> list[dict[str, Any]]:
        # Five times the longest that the link alone takes: a shared one may be slow and not stuck.
        link = 0.0 if rate is None else 5 * 8 * self._largest / rate
        return self._workers.ask(request, timeout=self._options.timeout + link, doing=doing)

    def _compile(self, setting: Setting) -> dict[str, Any]:
        answers = self._ask({"do": "compile", "setting": setting.name}, f"compiling {setting.name}")
        self._advance(f"compiled {setting.name}")
        checksums = {number for answer in answers for number in answer["checksums"]}
        return {"vnmse": answers[0]["vnmse"], "replicas_equal": len(checksums) == 1}

    def _timed(self, rate: float | None) -> dict[str, dict[str, Any]]:
        """Times of all settings at a rate, in turns. The first turn warms up and does not count.

        Returns:
          Setting to seconds, CPU seconds and interface bytes: a number for each repeat, the time
          of the slowest host and the means over hosts of the others.
        """
        self._network.set_rate(rate)
        names = ("seconds", "cpu_seconds", "interface_bytes")
        found: dict[str, dict[str, Any]] = {
            s.name: {name: [] for name in names} for s in self._settings
        }
        at = "an unlimited link" if rate is None else format_rate(rate)
        for repeat in range(-1, self._options.repeats):
            for setting in self._settings:
                request = {"do": "run", "setting": setting.name, "seed": repeat + 2}
                before = self._network.bytes_sent()
                answers = self._ask(request, f"measuring {setting.name} at {at}", rate)
                after = self._network.bytes_sent()
                self._advance(f"{setting.name} at {at}")
                if repeat >= 0:
                    sent = [b - a for a, b in zip(before, after, strict=True)]
                    numbers = (
                        max(answer["seconds"] for answer in answers),
                        statistics.fmean(answer["cpu_seconds"] for answer in answers),
                        statistics.fmean(sent),
                    )
                    for name, number in zip(names, numbers, strict=True):
                        found[setting.name][name].append(number)
        return found

    def _row(
        self, setting: Setting, rate: float, timed: dict[str, Any], local: dict[str, Any]
    ) -> dict[str, Any]:
        """What the table and the JSON file say of one setting at one rate."""
        sent = setting.wire_report(self._size, self.num_hosts).bytes_per_worker
        seconds, ideal = statistics.median(timed["seconds"]), 8 * sent / rate
        on_interface = statistics.median(timed["interface_bytes"])
        return {
            "setting": setting.name,
            "hosts": self.num_hosts,
            "rate": rate,  # bits a second
            "size": self._size,
            "seconds": seconds,
            "repeats": timed["seconds"],
            "wire_seconds": ideal,  # the bytes of wire_report at the rate, nothing else
            "times_wire": seconds / ideal,
            "local_seconds": statistics.median(local["seconds"]),  # the same on unlimited links
            "cpu_seconds": statistics.median(timed["cpu_seconds"]),  # of each host
            "bytes_per_worker": sent,
            "interface_bytes": on_interface,
            "overhead": on_interface / sent,
        }


def network_table(rows: list[dict[str, Any]]) -> Table:
    """Results at one rate, as a rich table."""
    row = rows[0]
    table = tables.table(
        f"{row['hosts']} hosts at {format_rate(row['rate'])}, {format_size(row['size'])} float32 "
        "coordinates",
        ("setting",),
        (
            "time",
            "wire alone",
            "time / wire",
            "unlimited link",
            "vs psum",
            "vs BF16",
            "sent by each",
            "on interface",
            "vNMSE",
        ),
    )
    for row in rows:
        table.add_row(
            row["setting"],
            format_seconds(row["seconds"]),
            format_seconds(row["wire_seconds"]),
            f"{row['times_wire']:.2f}",
            format_seconds(row["local_seconds"]),
            *(
                f"{row['speedup'][n]:.2f}x" if n in row["speedup"] else ""
                for n in (PSUM, BF16_RING)
            ),
            format_bytes(row["bytes_per_worker"]),
            f"x {row['overhead']:.3f}",
            f"{row['vnmse']:.1e}",
        )
    table.caption = (
        "wire alone: the bytes sent at the rate. unlimited link: codec, memory and TCP of all "
        "hosts on this machine's cores. on interface: with headers and acknowledgements."
    )
    return table


def _speedups(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times faster than each baseline that is in the run."""
    speedups = {}
    for name in (PSUM, BF16_RING):
        for other in rows:
            same = (other["hosts"], other["rate"]) == (row["hosts"], row["rate"])
            if same and other["setting"] != row["setting"] and is_same(other["setting"], name):
                speedups[name] = other["seconds"] / row["seconds"]
    return speedups


def _series(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Group (hosts and rate) to setting to seconds."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        label = f"{row['hosts']} hosts, {format_rate(row['rate'])}"
        groups.setdefault(label, {})[row["setting"]] = row["seconds"]
    return groups
