"""`dynamiq-jax bench`: all-reduce on the devices that are there."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from rich.table import Table

import dynamiq_jax as dq
from dynamiq_jax._commands.devices import OnDevices
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.environment import of_cpu_programs
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import (
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_size,
)
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._measurement.all_reduce import Measurement, measure
from dynamiq_jax._measurement.devices import make_mesh, workers_per_machine
from dynamiq_jax._measurement.settings import (
    BF16_RING,
    DEFAULTS,
    PSUM,
    parse_setting,
    parse_settings,
)
from dynamiq_jax._prediction.break_even import record
from dynamiq_jax._prediction.device_speeds import kind_of
from dynamiq_jax.methods import DynamiQ
from pallas_kernels import operations


@dataclasses.dataclass(frozen=True)
class Bench(OnDevices):
    """Time an all-reduce on the devices of this process, or of several processes.

    Times each setting at each size, and prints the bytes sent, the error, and the link speed below
    which the setting beats jax.lax.psum and a BF16 ring. The last line is a `dynamiq-jax advise`
    command with the measured codec time.

    On a machine without accelerators, virtual CPU devices are used, whose memory is kept between
    calls, as by dq.keep_memory(). To run over several processes, see --coordinator.
    """

    sizes: tuple[str, ...] = ("1Mi", "8Mi")
    """Float32 coordinates of the gradient: 4096, 1M (10**6), 8Mi (8 * 2**20)."""

    settings: tuple[str, ...] = DEFAULTS
    """psum, which is jax.lax.psum, or [ef+|gc+|ef21m+]METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]... The
    error of a wrong one lists the possible ones."""

    repeats: int = 9
    """Timed calls of each all-reduce. The median counts."""

    link: str | None = None
    """Speed of the links between these devices, such as 400gbit. If given, the transfer time at
    this speed is subtracted from the measured time to get the codec time. By default nothing is
    subtracted, which is right for devices that share memory."""

    def run(self) -> int:
        """Measure and report; return the exit status."""
        settings = parse_settings(self.settings)
        sizes = [parse_size(text, least=dq.Compression().exact_below) for text in self.sizes]
        link = None if self.link is None else parse_rate(self.link, "--link")
        if not sizes:
            raise CommandError("--sizes: nothing to measure. Give one such as 8Mi.")
        options.check_range("--repeats", self.repeats, 1)
        options.check_outputs(self.json)
        dq.keep_memory()
        mesh = make_mesh(self.devices(least=2))
        for setting in settings:
            setting.wire_report(sizes[0], mesh.size)  # refuses what is not possible, early
        first = jax.process_index() == 0
        console = tables.console(quiet=not first)
        kind, platform = mesh.devices.flat[0].device_kind, mesh.devices.flat[0].platform
        console.out(f"{mesh.size} workers on devices of kind {kind}")
        console.out(f"By default, {operations.default_backend()}.")
        results: list[Measurement] = []
        steps = len(sizes) * len(settings) * (1 + self.repeats)
        with tables.progress(console, "all-reduce", steps) as advance:
            for size in sizes:
                results += measure(settings, mesh, size, repeats=self.repeats, done=advance)
        sharing = workers_per_machine(mesh)  # on all processes
        rows = [record(result, results, link, sharing) for result in results]
        if first:
            records.keep(self, kind, rows, **(of_cpu_programs() if platform == "cpu" else {}))
            for size in sizes:
                console.print(bench_table([row for row in rows if row["size"] == size]))
            device = kind_of(platform, kind)
            with_wire = link is None and sharing < mesh.size
            if recommendation := to_advise(rows, device, with_wire=with_wire):
                console.out(recommendation)  # not wrapped: a line to paste
        return tables.warn_unequal(console, rows)


def bench_table(rows: list[dict[str, Any]]) -> Table:
    """Make the table of one size, from the rows of `record`."""
    table = tables.table(
        f"{format_size(rows[0]['size'])} float32 coordinates, {rows[0]['workers']} workers",
        ("setting",),
        (
            *("time", "GB/s", "codec ns", "bits", "sent by each", "vNMSE"),
            *("beats psum below", "beats BF16 below"),
        ),
    )
    for row in rows:
        table.add_row(
            row["setting"],
            format_seconds(row["seconds"]),
            f"{row['bandwidth'] / 1e9:.2f}",
            _ns(row["codec_ns"]),
            f"{row['bits']:.2f}",
            format_bytes(row["bytes_per_worker"]),
            f"{row['vnmse']:.1e}",
            *(_rate(row["break_even"].get(name)) for name in (PSUM, BF16_RING)),
        )
    table.caption = (
        "GB/s: float32 bytes reduced in a second. codec ns: nanoseconds of a worker for each "
        "coordinate, everything but the known link; where workers share the cores of a machine, "
        "as if one had them alone. beats ... below: speed of a link under which the setting takes "
        "less time, with the codec as fast as here. Workers that share cores are slower than on "
        "machines of their own, for which `advise` predicts."
    )
    return table


def to_advise(rows: Sequence[dict[str, Any]], device: str, *, with_wire: bool) -> str | None:
    """Write the `dynamiq-jax advise` that goes on from here, on a line of its own.

    None if no setting is DynamiQ, of which the command gives advice. `with_wire` says that codec ns
    hold the time on the links between the devices.
    """
    ours = [(row, parse_setting(row["setting"]).method) for row in rows]
    dynamiq = [(row, method) for row, method in ours if isinstance(method, DynamiQ)]
    if not dynamiq:
        return None
    # The largest size: steps and caches count least. And the bits nearest to the default.
    row, _ = min(dynamiq, key=lambda each: (-each[0]["size"], abs(each[1].bits - 5)))
    text = f"From {row['setting']} with {format_size(row['size'])} coordinates"
    if with_wire:
        text += ", which holds the time on the links between these devices: --link takes it out"
    return (
        f"{text}. For your network, add its --link, --size and --workers:\n"
        f"dynamiq-jax advise --device {device} --codec-ns {_ns(row['codec_ns'])}"
    )


def _ns(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return ""
    return "always" if math.isinf(value) else "never" if value == 0 else format_rate(value)
