"""Outputs of every operation of every backend on this machine, against those of the base."""

import contextlib
import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import numpy as np

from dynamiq_jax._console.environment import num_cores
from dynamiq_jax._measurement.devices import on_all_processes
from dynamiq_jax.methods import DynamiQ
from pallas_kernels import modes, registry
from pallas_kernels._jax.own_thread import in_own_thread
from pallas_kernels.differences import compare
from pallas_kernels.trial import CALLS, Trial, make_trial

BASE = registry.BASE.name
_MOST_THREADS = 16
_MESSAGES = "messages"
_ROWS, _MANY_ROWS = 37, 2085  # of a chunk: blocks of any usual size overhang


class KernelVerdict(IntEnum):
    """Outcome of one operation, from the best to the worst."""

    ABSENT = 0  # the backend makes the operation of its others, or does not take the case
    NOT_HERE = 1  # the backend cannot run on this machine
    SAME = 2  # no byte differs
    ROUNDING = 3  # bytes differ by one step of rounding
    DIFFERENT = 4  # bytes differ by more
    FAILED = 5  # it does not compile, or not in time, or raises an error


class KernelCase(NamedTuple):
    """Rows on which backends are compared."""

    method: DynamiQ
    usual: int  # width of most rows of a chunk; every other width of the method has one
    dtype: str = "float32"
    rows: int = _ROWS  # of a chunk

    def trial(self) -> Trial:
        """Make the inputs of all operations."""
        layout = self.method.layout(1, 1)
        others = [width for width in layout.allocation.widths if width != self.usual]
        widths = [*others, *[self.usual] * (self.rows - len(others))]
        return make_trial(layout.quantizer, widths, dtype=np.dtype(jax.numpy.dtype(self.dtype)))


_ALL_WIDTHS = DynamiQ(bits=9.0, widths=(0, *range(2, 17)))
# Every width, group size, rounding, spacing and dtype; the first two matter most.
CASES = {
    "default": KernelCase(DynamiQ(), 4),
    "bfloat16": KernelCase(DynamiQ(), 5, "bfloat16"),
    "all widths": KernelCase(_ALL_WIDTHS, 4),
    "paper": KernelCase(DynamiQ.paper(), 4, "float16"),
    "groups of 8": KernelCase(
        DynamiQ(bits=4.0, widths=(6, 2, 0), group_size=8, rounding="independent", gap_ratio=1),
        2,
        "bfloat16",
    ),
    "two widths": KernelCase(DynamiQ(bits=5.0, widths=(3, 7), rounding="nearest"), 7),
    "wide": KernelCase(DynamiQ(bits=13.0, widths=(9, 16), group_size=16), 9),
    "two rows": KernelCase(DynamiQ(bits=6.0, widths=(5, 8)), 5, rows=2),
    "many rows": KernelCase(_ALL_WIDTHS, 5, rows=_MANY_ROWS),
}
# Interpreted kernels take minutes for many rows.
INTERPRETED_CASES = tuple(name for name, case in CASES.items() if case.rows <= _ROWS)


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """One operation of one backend in one case."""

    backend: str
    operation: str
    case: str
    dtype: str
    verdict: KernelVerdict
    compared: int = 0  # bytes
    differing: int = 0  # bytes
    text: str = ""  # an error, or the reason why the backend is not here
    checksum: int = 0  # of the output

    @property
    def name(self) -> str:
        """Backend and operation, with the case."""
        return f"{self.backend}: {self.operation} ({self.case}, {self.dtype})"

    def row(self) -> dict[str, Any]:
        """Return this check as a row of a result file."""
        return dataclasses.asdict(self) | {"verdict": self.verdict.name.lower()}

    def ended(self, verdict: KernelVerdict, text: str) -> "KernelCheck":
        """Return this check with another outcome."""
        return dataclasses.replace(self, verdict=verdict, text=text)


def check_kernels(
    backends: Sequence[str],
    cases: Sequence[str],
    *,
    interpret: bool,
    timeout: float,
    done: Callable[[str], None],
) -> list[KernelCheck]:
    """Compare all operations of backends with the base.

    The base itself is compared with that of the CPU of this host, where the device is another. The
    compiler and the run of an operation may take `timeout` seconds. `done` is called with a text
    after every operation.

    Returns:
      A check of every operation of every backend in every case: cases are the outer loop.
    """
    pairs = [(backend, operation) for backend in backends for operation in CALLS]
    checks: list[KernelCheck] = []
    # Nearly all of the time is that of the compiler, which takes one core for an operation. The
    # interpreters of Pallas keep state for all threads of a process.
    threads = 1 if interpret else min(_MOST_THREADS, num_cores())
    with ThreadPoolExecutor(threads) as pool:
        for name in cases:
            case = _CaseRun(name, interpret, timeout)
            for check in pool.map(case.check, *zip(*pairs, strict=True)):
                checks.append(check)
                done(check.name)
    return checks


def worst_of_processes(checks: Sequence[KernelCheck]) -> list[KernelCheck]:
    """Return the checks of this process with the worst verdict of all processes.

    Outputs that differ between processes are wrong: workers would hold different sums.
    """
    ours = [value for check in checks for value in (check.verdict, check.checksum)]
    of_processes = on_all_processes(ours, np.uint32).reshape(-1, len(checks), 2)
    worst = []
    for check, verdicts, checksums in zip(checks, *of_processes.transpose(2, 1, 0), strict=True):
        verdict = KernelVerdict(int(verdicts.max()))
        if verdict > check.verdict:
            where = ", ".join(map(str, np.flatnonzero(verdicts == verdict)))
            check = check.ended(verdict, f"in process {where}")
        elif verdict in (KernelVerdict.SAME, KernelVerdict.ROUNDING) and len(set(checksums)) > 1:
            text = "the bytes of this output differ between processes"
            check = check.ended(KernelVerdict.DIFFERENT, text)
        worst.append(check)
    return worst


class _CaseRun:
    """One case on the device of this process, and the outputs of the base for it."""

    def __init__(self, name: str, interpret: bool, timeout: float):
        self._name, self._case = name, CASES[name]
        self._interpret, self._timeout = interpret, timeout
        self._trial = self._case.trial()
        self._device = jax.local_devices()[0]
        # What the base makes, once it is needed, and by one thread.
        self._known: dict[str, np.ndarray] = {}
        self._locks = {name: threading.Lock() for name in (_MESSAGES, *CALLS)}

    def check(self, backend: str, operation: str) -> KernelCheck:
        """Compare one operation of a backend."""
        check = KernelCheck(backend, operation, self._name, self._case.dtype, KernelVerdict.SAME)
        kernels, device = registry.BACKENDS[backend], self._device
        with self._mode():
            reason = kernels.why_not_here()
        if backend == BASE:
            device = _cpu_device() or device
            if device == self._device:
                reason = "the base, with which others are compared"
        if reason:
            return check.ended(KernelVerdict.NOT_HERE, reason)
        if kernels.derives(CALLS[operation]):
            return check.ended(KernelVerdict.ABSENT, "")
        try:
            if reason := in_own_thread(lambda: self._not_taken(backend, operation), self._timeout):
                return check.ended(KernelVerdict.ABSENT, reason)
            base = in_own_thread(lambda: self._of_base(operation), self._timeout)
            run = functools.partial(self._run, backend, operation, device)
            ours, again = in_own_thread(run, self._timeout)
            found = compare(ours, base, self._trial.layout, self._trial.widths)
        except Exception as error:  # of any kind: it is that of a compiler
            text = f"{type(error).__name__}: {str(error).strip():.300}"
            return check.ended(KernelVerdict.FAILED, text)
        if ours.tobytes() != again.tobytes():  # a race, or memory that nothing wrote
            text = "its output differs from one run to the next"
            return check.ended(KernelVerdict.DIFFERENT, text)
        if found.differing:
            verdict = KernelVerdict.ROUNDING if found.is_rounding else KernelVerdict.DIFFERENT
            check = check.ended(verdict, found.text)
        return dataclasses.replace(
            check,
            compared=found.compared,
            differing=found.differing,
            checksum=zlib.crc32(ours.tobytes()),
        )

    def _not_taken(self, backend: str, operation: str) -> str | None:
        """Return the reason why a backend does not take the case, if it does not."""
        call = self._trial.calls(self._messages())[operation]
        with self._mode():
            kernels = registry.BACKENDS[backend]
            return kernels.why_not_for(call.operation, *call.arrays, **call.static)

    def _of_base(self, operation: str) -> np.ndarray:
        with self._locks[operation]:
            if operation not in self._known:
                self._known[operation], _ = self._run(BASE, operation, self._device)
            return self._known[operation]

    def _run(
        self, backend: str, operation: str, device: jax.Device
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compile an operation and return the outputs of two runs."""
        call = self._trial.calls(self._messages())[operation]

        def run(*arrays: Any) -> Any:
            return call._replace(arrays=arrays).by(registry.BACKENDS[backend])

        # The mode is a context variable, and a thread begins without it.
        with self._mode(), jax.default_device(device):
            compiled = jax.jit(run).lower(*call.arrays).compile()
            return np.asarray(compiled(*call.arrays)), np.asarray(compiled(*call.arrays))

    def _messages(self) -> np.ndarray:
        """Return messages that arrive, by the base."""
        with self._locks[_MESSAGES], jax.default_device(self._device):
            if _MESSAGES not in self._known:
                self._known[_MESSAGES] = np.asarray(self._trial.send(registry.BASE))
            return self._known[_MESSAGES]

    def _mode(self) -> contextlib.AbstractContextManager[None]:
        return modes.without_gpu("interpret") if self._interpret else contextlib.nullcontext()


def _cpu_device() -> jax.Device | None:
    """Return a CPU device of this host; None if JAX was told to have no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
