"""`dynamiq-jax verify`: bytes of the kernels on a machine that is new."""

import dataclasses
import warnings
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from dynamiq_jax._commands.devices import OnDevices
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._measurement.kernel_checks import (
    CASES,
    INTERPRETED_CASES,
    KernelCheck,
    KernelVerdict,
    check_kernels,
    worst_of_processes,
)
from pallas_kernels import operations
from pallas_kernels.registry import BACKENDS
from pallas_kernels.trial import CALLS

_MARKS = {
    KernelVerdict.ABSENT: "-",
    KernelVerdict.SAME: "[green]same[/green]",
    KernelVerdict.ROUNDING: "[yellow]rounding[/yellow]",
    KernelVerdict.DIFFERENT: "[red]DIFFERENT[/red]",
    KernelVerdict.FAILED: "[red]FAILED[/red]",
}


@dataclasses.dataclass(frozen=True)
class Verify(OnDevices):
    """Check the bytes of the kernels on this machine.

    Compares every operation of every kernel backend that can run here with the base, `xla`, bit for
    bit and on hard values. `dynamiq-jax bench` measures the speed of an all-reduce.

    The exit status is 1 if a byte differs or an operation fails. Attach the file of --json to an
    issue. To run over several processes, see --coordinator.
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

    def run(self) -> int:
        """Verify and report; return the exit status."""
        _check_names("--backends", self.backends, tuple(BACKENDS))
        _check_names("--cases", self.cases, tuple(CASES))
        options.check_range("--timeout", self.timeout, 1)
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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # those of backends that are refused
            default, refused = operations.default_backend(), operations.refused_backends()
        warned = [str(each.message) for each in caught]
        for text in (*problems, *warned):
            console.out(text, style="red")
        console.out(f"By default, {default}.")
        compared = sum(check.verdict != KernelVerdict.ABSENT for check in checks)
        console.out(
            f"{len(problems)} of {compared} outputs are not right. The library does not use a "
            "backend that fails its own check. Please attach the file of --json to an issue."
            if problems
            else f"Right: {compared} outputs of kernels."
        )
        console.out("`dynamiq-jax bench` measures the speed.")
        if first:
            results = {
                "checks": [check.row() for check in checks],
                "not_compared": not_here,
                "default": default,
                "refused": refused,
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
