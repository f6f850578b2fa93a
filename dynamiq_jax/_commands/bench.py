"""`dynamiq-jax bench`: all-reduce on the devices that are there."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.table import Table

import dynamiq_jax as dq
from dynamiq_jax._api.keep_memory import memory_is_kept
from dynamiq_jax._console import options, plots, records, tables
from dynamiq_jax._console.environment import environment, of_cpu_programs
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.kernels import print_default
from dynamiq_jax._console.units import (
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_size,
)
from dynamiq_jax._core.units import format_bytes
from dynamiq_jax._measurement.devices import make_mesh, worker_devices, workers_per_machine
from dynamiq_jax._measurement.measure import Measurement, measure
from dynamiq_jax._measurement.settings import (
    BF16_RING,
    DEFAULTS,
    PSUM,
    parse_setting,
    parse_settings,
)
from dynamiq_jax._prediction.break_even import record
from dynamiq_jax.methods import DynamiQ

_MEMORY = {
    True: "Memory is kept between calls, as by dq.keep_memory() in a program of yours.",
    False: "Memory is not kept between calls: malloc may map all large buffers anew.",
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """Time an all-reduce on the devices of this process, or of several processes.

    Times each setting at each size, and prints the bytes sent, the error, and the link speed below
    which the setting beats jax.lax.psum and a BF16 ring. The last line is a `dynamiq-jax advise`
    command with the measured codec time.

    On a machine without accelerators, virtual CPU devices are used. To run over several processes,
    start the same command in each of them with --coordinator HOST:PORT --num-processes N
    --process-id I, or with --coordinator auto under Slurm, MPI or Kubernetes.
    """

    sizes: tuple[str, ...] = ("1Mi", "8Mi")
    """Float32 coordinates of the gradient: 4096, 1M (10**6), 8Mi (8 * 2**20)."""

    settings: tuple[str, ...] = DEFAULTS
    """psum, which is jax.lax.psum, or [ef+|gc+|ef21m+]METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]... The
    error of a wrong one lists the possible ones."""

    repeats: int = 9
    """Timed calls of each setting. The median counts."""

    cpu_devices: int | None = None
    """Use as many virtual CPU devices, even where there are GPUs. By default 8 where there is no
    accelerator and one process."""

    link: str | None = None
    """Speed of the links between these devices, such as 400gbit. If given, the transfer time at
    this speed is subtracted from the measured time to get the codec time. By default nothing is
    subtracted, which is right for devices that share memory."""

    coordinator: str | None = None
    """Join other processes through this HOST:PORT of process 0, or `auto`."""

    num_processes: int | None = None
    """Number of processes to join."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    keep_memory: bool = True
    """Keep memory between calls, as dq.keep_memory() does in a program of yours. It holds for all
    settings alike, and matters to CPU devices alone."""

    seed: int = 0
    """Chooses gradients and rounding."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything that was measured, with versions and hardware, to this file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw the times to this file (.png, .svg or .pdf)."""

    def run(self) -> int:
        """Measure and report; return the exit status."""
        settings = parse_settings(self.settings)
        sizes = [parse_size(text) for text in self.sizes]
        link = None if self.link is None else parse_rate(self.link, "--link")
        if not sizes:
            raise CommandError("--sizes: nothing to measure. Give one such as 8Mi.")
        options.check_least("--repeats", self.repeats, 1)
        options.check_seed(self.seed)
        options.check_outputs(self.json, self.plot)
        if self.keep_memory:
            dq.keep_memory()
        devices = worker_devices(
            cpu_devices=self.cpu_devices,
            coordinator=self.coordinator,
            num_processes=self.num_processes,
            process_id=self.process_id,
        )
        mesh = make_mesh(devices)
        for setting in settings:
            setting.wire_report(sizes[0], mesh.size)  # refuses what is not possible, early
        first = jax.process_index() == 0
        console = tables.console(quiet=not first)
        kind, platform = devices[0].device_kind, devices[0].platform
        console.print(f"{mesh.size} workers on devices of kind {kind}", highlight=False)
        print_default(console)
        if platform == "cpu":
            console.print(_MEMORY[memory_is_kept()], highlight=False, soft_wrap=True)
        results: list[Measurement] = []
        steps = len(sizes) * len(settings) * (1 + self.repeats)
        with tables.progress(console, "bench", steps) as advance:
            for size in sizes:
                results += measure(
                    settings, mesh, size, repeats=self.repeats, seed=self.seed, done=advance
                )
        sharing = workers_per_machine(mesh)
        rows = [record(result, results, link, sharing) for result in results]
        if first:
            if self.json is not None:
                where = environment(kind) | (of_cpu_programs() if platform == "cpu" else {})
                records.write(self.json, where, dataclasses.asdict(self), rows)
            plots.save_bars(self.plot, "time of one all-reduce", _series(rows))
            for size in sizes:
                console.print(bench_table([row for row in rows if row["size"] == size]))
            device = "cpu" if platform == "cpu" else "gpu"
            if recommendation := to_advise(
                rows, device, with_wire=link is None and sharing < mesh.size
            ):
                # Not wrapped: a line to paste.
                console.print(recommendation, highlight=False, soft_wrap=True)
        return tables.warn_unequal(console, rows)


def bench_table(rows: list[dict[str, Any]]) -> Table:
    """Make the table of one size."""
    table = tables.table(
        f"{format_size(rows[0]['size'])} float32 coordinates, {rows[0]['workers']} workers",
        ("setting",),
        (
            "time",
            "GB/s",
            "codec ns",
            "bits",
            "sent by each",
            "vNMSE",
            "beats psum below",
            "beats BF16 below",
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

    Args:
      rows: rows of the table, from `record`.
      device: "cpu" or "gpu".
      with_wire: whether codec ns hold the time on the links between the devices.

    Returns:
      The text; None if no setting is DynamiQ, of which the command gives advice.
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


def _series(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return group (a size) to setting to seconds."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(format_size(row["size"]), {})[row["setting"]] = row["seconds"]
    return groups
