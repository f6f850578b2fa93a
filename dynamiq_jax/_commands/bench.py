"""`dynamiq-jax bench`: all-reduce on the devices that are there."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from dynamiq_jax._workshop import tables
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.joining import join
from dynamiq_jax._workshop.measure import (
    Measurement,
    check_seed,
    make_mesh,
    measure,
    workers_per_machine,
)
from dynamiq_jax._workshop.processes import MALLOC
from dynamiq_jax._workshop.settings import (
    BF16_RING,
    DEFAULTS,
    PSUM,
    Setting,
    is_same,
    parse_setting,
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
from dynamiq_jax.methods import DynamiQ

_MALLOC_HINT = (
    "With glibc, all of this takes half of the time or less on CPU devices where malloc keeps "
    f"large buffers: GLIBC_TUNABLES={MALLOC}"
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """All-reduce on the devices of this process, or of several processes.

    Times every setting at every size, in turns, beside the bytes that it sends and its error, and
    says below which speed of a link it would beat jax.lax.psum and a ring of BF16. Its last line is
    the `dynamiq-jax advise` that goes on from there.

    On a machine without accelerators this uses virtual CPU devices. To run over several processes,
    start the same command in each of them with --coordinator HOST:PORT --num-processes N
    --process-id I, or with --coordinator auto under Slurm, MPI or Kubernetes.
    """

    sizes: tuple[str, ...] = ("1Mi", "8Mi")
    """Float32 coordinates of the gradient: 4096, 1M (10**6), 8Mi (8 * 2**20)."""

    settings: tuple[str, ...] = DEFAULTS
    """METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]; psum is jax.lax.psum. A wrong one lists the
    possible ones."""

    repeats: int = 9
    """Timed calls of each setting. The median counts."""

    cpu_devices: int | None = None
    """Use as many virtual CPU devices, even where there are GPUs. By default 8 where there is no
    accelerator and one process."""

    link: str | None = None
    """Speed of the links between these devices, such as 400gbit. Time on them then does not count
    as codec time. By default all time does, as fits devices that share a memory."""

    coordinator: str | None = None
    """Join other processes through this HOST:PORT of process 0, or `auto`."""

    num_processes: int | None = None
    """Number of processes to join."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    seed: int = 0
    """Chooses gradients and rounding."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything that was measured, with versions and hardware, to this file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw the times to this file (.png, .svg or .pdf)."""

    def run(self) -> int:
        """Measures and reports; returns the exit status."""
        settings = parse_settings(self.settings)
        sizes = [parse_size(text) for text in self.sizes]
        link = None if self.link is None else parse_rate(self.link, "--link")
        if not sizes:
            raise CommandError("--sizes: nothing to measure. Give one such as 8Mi.")
        if self.repeats < 1:
            raise CommandError(f"--repeats is {self.repeats}: give at least 1.")
        check_seed(self.seed)
        tables.check_outputs(self.json, self.plot)
        mesh = make_mesh(self._devices())
        for setting in settings:
            setting.wire_report(sizes[0], mesh.size)  # refuses what is not possible, early
        first = jax.process_index() == 0
        console = tables.console(quiet=not first)
        device = mesh.devices[0].device_kind
        console.print(f"{mesh.size} workers on devices of kind {device}", highlight=False)
        results = measure_all(settings, mesh, sizes, self, console)
        sharing = workers_per_machine(mesh)
        rows = [record(result, results, link, sharing) for result in results]
        if first:
            for size in sizes:
                console.print(bench_table([row for row in rows if row["size"] == size]))
            platform = "cpu" if mesh.devices[0].platform == "cpu" else "gpu"
            if platform == "cpu" and "GLIBC_TUNABLES" not in os.environ:
                console.print(_MALLOC_HINT, highlight=False)
            if found := to_advise(rows, platform, with_wire=link is None and sharing < mesh.size):
                # Not wrapped: a line to paste.
                console.print(found, highlight=False, soft_wrap=True)
            tables.save_json(self.json, device, dataclasses.asdict(self), rows)
            tables.save_plot(self.plot, "time of one all-reduce", _series(rows))
        return tables.warn_unequal(console, rows)

    def _devices(self) -> Sequence[jax.Device]:
        """The workers' devices. Sets JAX up for them, which has to precede its first use."""
        several = self.coordinator is not None
        joining = (self.num_processes, self.process_id)
        if not several and joining != (None, None):
            raise CommandError(
                "--num-processes and --process-id are given, but no --coordinator. Give the "
                "HOST:PORT of process 0."
            )
        if several and self.coordinator != "auto" and None in joining:
            raise CommandError(
                f"--coordinator is {self.coordinator}, but --num-processes is {joining[0]} and "
                f"--process-id is {joining[1]}: give all three, or --coordinator auto."
            )
        if self.cpu_devices is not None and self.cpu_devices < 1:
            raise CommandError(f"--cpu-devices is {self.cpu_devices}: give at least 1.")
        if self.cpu_devices is not None:
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", self.cpu_devices or (1 if several else 8))
        if several:
            address = None if self.coordinator == "auto" else self.coordinator
            try:
                join(address, self.num_processes, self.process_id)
            except (ValueError, RuntimeError) as error:
                raise CommandError(f"--coordinator is {self.coordinator}: {error}") from None
        devices = jax.devices()
        if len(devices) == 1:
            raise CommandError(
                f"there is one device ({devices[0].device_kind}), and nothing to exchange. Give "
                "--cpu-devices 8 for virtual CPU devices, or join processes with --coordinator."
            )
        return devices


def break_even_rate(codec: float, sent: int, other_codec: float, other_sent: int) -> float:
    """Speed of a link, in bits a second, below which one setting beats another; inf: always.

    On a link of r bits a second a setting takes T + 8 B / r, with T its codec time (everything but
    the wire: the measured time less 8 B / link where the devices' own links are known, the measured
    time where they share a memory) and B the bytes that each worker sends. The two are equal at

        r = 8 (B_other - B) / (T - T_other)

    Args:
      codec: seconds, T of the setting.
      sent: bytes, B of the setting.
      other_codec: the same of the other.
      other_sent: the same of the other.

    >>> round(break_even_rate(0.03, 10**6, 0.01, 6 * 10**6) / 1e9, 3)
    2.0
    """
    if sent >= other_sent:
        return math.inf if codec < other_codec and sent == other_sent else 0.0
    return 8 * (other_sent - sent) / (codec - other_codec) if codec > other_codec else math.inf


def measure_all(
    settings: Sequence[Setting], mesh: Mesh, sizes: Sequence[int], options: Bench, console: Console
) -> list[Measurement]:
    """Measures all settings at all sizes, with a progress bar."""
    steps = len(sizes) * len(settings) * (1 + options.repeats)
    results = []
    with tables.progress(console, "bench", steps) as advance:
        for size in sizes:
            results += measure(
                settings, mesh, size, repeats=options.repeats, seed=options.seed, done=advance
            )
    return results


def record(
    result: Measurement, results: list[Measurement], link: float | None, sharing: int
) -> dict[str, Any]:
    """What the table and the JSON file say of one measurement.

    Args:
      result: the measurement.
      results: all of the run, among them those to compare with.
      link: bits a second of the links between the devices; None if they share a memory.
      sharing: workers that share the cores of one machine.
    """
    row = dataclasses.asdict(result) | {
        "bandwidth": result.bandwidth,
        "codec_seconds": _codec_seconds(result, link),
        # `CodecSpeed.ns_per_coordinate`: of a worker that has the machine for itself.
        "codec_ns": 1e9 * _codec_seconds(result, link) / (result.size * sharing),
        "break_even": {},
    }
    for name in (PSUM, BF16_RING):
        other = _find(results, name, result.size)
        if other is not None and other.setting != result.setting:
            row["break_even"][name] = break_even_rate(
                _codec_seconds(result, link),
                result.bytes_per_worker,
                _codec_seconds(other, link),
                other.bytes_per_worker,
            )
    return row


def bench_table(rows: list[dict[str, Any]]) -> Table:
    """Results at one size, as a rich table."""
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
        "less time, with the codec as fast as here."
    )
    return table


def to_advise(rows: Sequence[dict[str, Any]], device: str, *, with_wire: bool) -> str | None:
    """How to go on with `dynamiq-jax advise`, the command on a line of its own; None if no setting
    is DynamiQ, of which it gives advice.

    Args:
      rows: as from `record`.
      device: "cpu" or "gpu".
      with_wire: whether codec ns hold the time on the links between the devices.
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


def _codec_seconds(result: Measurement, link: float | None) -> float:
    wire = 0.0 if link is None else 8 * result.bytes_per_worker / link
    return max(0.0, result.seconds - wire)


def _find(results: list[Measurement], name: str, size: int) -> Measurement | None:
    return next((r for r in results if r.size == size and is_same(r.setting, name)), None)


def _ns(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return ""
    return "always" if math.isinf(value) else "never" if value == 0 else format_rate(value)


def _series(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Group (a size) to setting to seconds."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(format_size(row["size"]), {})[row["setting"]] = row["seconds"]
    return groups
