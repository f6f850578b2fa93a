"""`dynamiq-jax verify`: right bytes and speed of the kernels on a machine that is new."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from dynamiq_jax._commands.bench import bench_table, measured_rows
from dynamiq_jax._commands.devices import OnDevices
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_rate, format_seconds, format_size, parse_size
from dynamiq_jax._inputs.compression import Compression
from dynamiq_jax._measurement.devices import make_mesh
from dynamiq_jax._measurement.kernel_checks import (
    BASE,
    CASES,
    INTERPRETED_CASES,
    KernelCheck,
    KernelVerdict,
    check_kernels,
    worst_of_processes,
)
from dynamiq_jax._measurement.kernel_speed import Batches, Speed, copy_speed, measure_kernels
from dynamiq_jax._measurement.settings import BF16_RING, DEFAULTS, PSUM, parse_settings
from dynamiq_jax._prediction.break_even import RING_WORKERS, rate_of_kernels
from dynamiq_jax.methods import DynamiQ
from pallas_kernels import operations
from pallas_kernels.registry import BACKENDS
from pallas_kernels.trial import CALLS

_METHOD = DynamiQ()  # that is timed
_MOST_ERROR = 4.0 ** (3 - 5)  # vNMSE: far above any right answer at 5 bits, far below a wrong one
_MARKS = {
    KernelVerdict.ABSENT: "-",
    KernelVerdict.SAME: "[green]same[/green]",
    KernelVerdict.ROUNDING: "[yellow]rounding[/yellow]",
    KernelVerdict.DIFFERENT: "[red]DIFFERENT[/red]",
    KernelVerdict.FAILED: "[red]FAILED[/red]",
}


@dataclasses.dataclass(frozen=True)
class Verify(OnDevices):
    """Check the bytes and the speed of the kernels on this machine.

    Compares every operation of every kernel backend that can run here with the base, `xla`, bit for
    bit and on hard values. Then it times the operations beside a copy of memory, and an all-reduce
    over the devices that are there beside jax.lax.psum and a ring of BF16, and says below which
    speed of a link compression pays here.

    The exit status is 1 if a byte differs, an operation fails, or a sum is wrong. Attach the file
    of --json to an issue. To run over several processes, start the same command in each of them
    with --coordinator HOST:PORT --num-processes N --process-id I, or with --coordinator auto under
    Slurm, MPI or Kubernetes.
    """

    backends: tuple[str, ...] = tuple(BACKENDS)
    """Backends to compare with the base."""

    cases: tuple[str, ...] = ()
    """Kinds of rows to compare on. By default all of them, without the largest if kernels are
    interpreted."""

    interpret: bool = False
    """Interpret kernels, where no device can run them. It takes minutes."""

    allow_rounding: bool = False
    """Exit with status 0 if bytes differ only by one step of rounding, as where a reciprocal is
    approximate."""

    timeout: float = 300.0
    """Seconds for the compiler and the run of one operation."""

    size: str = "8Mi"
    """Coordinates of the chunk that is timed, and of the gradient that is summed."""

    def run(self) -> int:
        """Verify and report; return the exit status."""
        size = parse_size(self.size, "--size", least=Compression().exact_below)
        _check_names("--backends", self.backends, tuple(BACKENDS))
        _check_names("--cases", self.cases, tuple(CASES))
        options.check_range("--timeout", self.timeout, 1)
        options.check_range("--repeats", self.repeats, 1)
        options.check_outputs(self.json)
        devices = self.devices(least=1)
        first = jax.process_index() == 0
        console = tables.console(quiet=not first)
        kind = devices[0].device_kind
        processes = jax.process_count()
        console.out(
            f"{len(devices)} devices of kind {kind}, {processes} processes, JAX {jax.__version__}"
        )
        checks = self._checks(console)
        least = KernelVerdict.DIFFERENT if self.allow_rounding else KernelVerdict.ROUNDING
        problems = [f"{check.name}: {check.text}" for check in checks if check.verdict >= least]
        not_here = {c.backend: c.text for c in checks if c.verdict == KernelVerdict.NOT_HERE}
        checks = [check for check in checks if check.backend not in not_here]
        for backend, reason in not_here.items():
            console.out(f"{backend}: not compared: {reason}")
        if checks:
            how = "interpreted" if self.interpret else "compiled for this machine"
            console.print(_checks_table(checks, how))
        else:
            console.out("No kernel can run here. --interpret compares them all the same, slowly.")
        copy, speeds = self._speeds(console, checks, size, problems)
        summed, warned = self._all_reduce(console, devices, size)
        for row in summed:
            if not row["replicas_equal"]:
                problems.append(f"{row['setting']}: workers do not hold the same bits")
            if not row["vnmse"] <= _MOST_ERROR:
                problems.append(f"{row['setting']}: the sum is wrong, vNMSE {row['vnmse']:.2g}")
        pays = _pays_below(summed, speeds, size)
        console.out(_advice(pays, alone=not summed))
        for text in (*problems, *warned):
            console.out(text, style="red")
        console.out(f"By default, {operations.default_backend()}.")
        compared = sum(check.verdict != KernelVerdict.ABSENT for check in checks)
        console.out(
            f"{len(problems)} of {compared} outputs or sums are not right. The library does not "
            "use a backend that fails its own check. Please attach the file of --json to an issue."
            if problems
            else f"Right: {compared} outputs of kernels, and all sums."
        )
        if first:
            results = {
                "checks": [
                    dataclasses.asdict(check) | {"verdict": check.verdict.name.lower()}
                    for check in checks
                ],
                "not_compared": not_here,
                "default": operations.default_backend(),
                "refused": operations.refused_backends(),
                "copy_bytes_per_second": copy,
                "speeds": [dataclasses.asdict(speed) for speed in speeds],
                "all_reduce": summed,
                "pays_below_bits_per_second": pays,
                "warnings": warned,
                "problems": problems,
            }
            facts = {"devices": len(devices), "processes": processes}
            records.keep(self, kind, results, platform=devices[0].platform, **facts)
        return int(bool(problems))

    def _checks(self, console: Console) -> list[KernelCheck]:
        cases = self.cases or (INTERPRETED_CASES if self.interpret else tuple(CASES))
        steps = len(cases) * len(self.backends) * len(CALLS)
        with tables.progress(console, "verify", steps) as advance:
            checks = check_kernels(
                self.backends, cases, interpret=self.interpret, timeout=self.timeout, done=advance
            )
        return worst_of_processes(checks)

    def _speeds(
        self, console: Console, checks: Sequence[KernelCheck], size: int, problems: list[str]
    ) -> tuple[float, list[Speed]]:
        """Time the base and the backends that are right, and print a table.

        Nothing is timed where kernels are interpreted. Errors are added to `problems`.
        """
        if self.interpret:
            return math.nan, []
        batches = Batches()
        # Several times the caches.
        copy = copy_speed(2**28 if jax.default_backend() == "cpu" else 2**30, batches)
        speeds: list[Speed] = []
        wrong = {check.backend for check in checks if check.verdict > KernelVerdict.ROUNDING}
        right = {check.backend for check in checks if check.is_right} - wrong - {BASE}
        for backend in (BASE, *(name for name in self.backends if name in right)):
            for dtype in ("float32", "bfloat16"):
                try:
                    speeds += measure_kernels(
                        backend, size, dtype=dtype, bits=_METHOD.bits, copy=copy, batches=batches
                    )
                except Exception as error:  # of any kind: it is that of a compiler
                    what = f"{type(error).__name__}: {error!s:.300}"
                    problems.append(f"{backend}: {size} coordinates ({dtype}): {what}")
        console.print(_speed_table(speeds, size, copy))
        return copy, speeds

    def _all_reduce(
        self, console: Console, devices: Sequence[jax.Device], size: int
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Sum over all devices, print a table, and return its rows and the library's warnings."""
        if len(devices) == 1:
            return [], []
        settings = parse_settings(DEFAULTS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = measured_rows(console, settings, make_mesh(devices), [size], self.repeats)
        console.print(bench_table(rows))
        ours = [str(w.message) for w in caught if "dynamiq-jax verify" in str(w.message)]
        return rows, list(dict.fromkeys(ours))


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise CommandError(f"{option}: {name!r} is not there. Give some of {', '.join(known)}.")
    if option == "--backends" and not names:
        raise CommandError(f"{option}: nothing to verify. Give some of {', '.join(known)}.")


def _checks_table(checks: Sequence[KernelCheck], how: str) -> Table:
    backends = list(dict.fromkeys(check.backend for check in checks))
    table = tables.table(f"Operations against the base, {how}", ("operation", "case"), backends)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for check in checks:
        cells.setdefault((check.operation, check.case), {})[check.backend] = _cell(check)
    for names, of_backends in cells.items():
        table.add_row(*names, *(of_backends[backend] for backend in backends))
    table.caption = (
        "same: no byte differs. rounding: some do, by one step of the rounding of a single "
        "operation. -: the backend does not have it, and others do the work. Norms are compared to "
        "1e-5: the order of a sum is each backend's own."
    )
    return table


def _cell(check: KernelCheck) -> str:
    if check.verdict in (KernelVerdict.ROUNDING, KernelVerdict.DIFFERENT):
        return f"{_MARKS[check.verdict]} {check.differing} of {check.compared} B"
    return _MARKS[check.verdict]


def _speed_table(speeds: Sequence[Speed], size: int, copy: float) -> Table:
    table = tables.table(
        f"{format_size(size)} coordinates, {_METHOD.bits:g} bits, one device; a copy of memory "
        f"reads and writes {copy / 1e9:.3g} GB/s",
        ("operation", "backend", "dtype"),
        ("time", "ns a coordinate", "of copy", "base takes"),
    )
    base = {(s.operation, s.dtype): s.seconds for s in speeds if s.backend == BASE}
    for speed in speeds:
        times = base[speed.operation, speed.dtype] / speed.seconds
        table.add_row(
            speed.operation,
            speed.backend,
            speed.dtype,
            format_seconds(speed.seconds),
            f"{1e9 * speed.seconds / size:.3g}",
            f"{speed.of_copy:.0%}",
            "" if speed.backend == BASE else f"{times:.1f}x",
        )
    table.caption = (
        "of copy: speed at which the operation moves the bytes that it has to move, over that of a "
        "copy."
    )
    return table


def _pays_below(
    summed: Sequence[dict[str, Any]], speeds: Sequence[Speed], size: int
) -> dict[str, float]:
    """Return the speed of a link below which compression pays, by what it is compared with."""
    if summed:
        return summed[-1]["break_even"]  # of the last one of `DEFAULTS`: DynamiQ
    of_backend: dict[str, dict[str, float]] = {}
    for speed in speeds:
        if speed.dtype == "float32":
            of_backend.setdefault(speed.backend, {})[speed.operation] = speed.seconds
    rates = [rate_of_kernels(times, size, _METHOD) for times in of_backend.values()]
    return {BF16_RING: max(rates)} if rates else {}


def _advice(pays: dict[str, float], *, alone: bool) -> str:
    if not pays:
        return "Nothing was timed: no link can be named below which compression pays."
    names = {PSUM: "jax.lax.psum", BF16_RING: "a ring of BF16"}
    texts = []
    for name, rate in pays.items():
        below = f"on links below {format_rate(rate)}" if rate else "on no link"
        where = "on every link" if math.isinf(rate) else below
        texts.append(f"{where}, compared with {names[name]}")
    how = f" From the operations alone, for a ring of {RING_WORKERS}." if alone else ""
    return f"Compression pays here {'; '.join(texts)}.{how}"
