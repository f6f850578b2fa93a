"""Comparison of what the processes of a job trace, by its content."""

import base64
import contextlib
import functools
import hashlib
import json
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dynamiq_jax._check import compiling, disagreement
from dynamiq_jax._check.disagreement import Description
from dynamiq_jax._check.ledger import (
    AGREED,
    WENT_ON,
    DescriptionRecord,
    Entry,
    Ledger,
    Verdict,
    Wait,
)

PATIENCE = 10.0  # seconds that a process waits for the others, once
SHORT_PATIENCE = 2.0  # the same after that, until the processes agree again
# Seconds to wait for processes that went on with another collective. They may be stuck in it, or
# have traced it for a log alone.
DOUBT = 60.0
_GLANCE = 0.2  # seconds until a process looks who else waits
_HELD = 600.0  # seconds for which a collective that a process went on with counts against it
_REPLY = 10.0  # seconds to wait for a description that was published before
# Seconds to wait for processes that still compile. They may have traced it for a log alone.
COMPILING = 1800.0


class Exchange:
    """Descriptions of one process, each compared once with equal ones of the other processes.

    A process sends four small messages to the coordination service for each: the description, its
    arrival, a request for the arrivals of all, and one that waits for the verdict, or gives it if
    this process is the last one. The order in which processes trace does not matter, nor the number
    of threads that do.
    """

    def __init__(self, client: Any, process: int):
        self.client = client
        self._process = process
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._lock = threading.Lock()

    def agree(
        self, description: Description, processes: tuple[int, ...], *, only_traces: bool = False
    ) -> None:
        """Compare a new description with those of other processes; return at once for a known one.

        A process goes on with a warning if others have not come within `PATIENCE` seconds. They
        compare their own description when they come. One that differs is not remembered: the next
        call with it is compared anew.

        A process that has compiled a program with a new description waits for those others that
        have traced it, before it sends the first message: gloo gives them 30 s to connect.

        A call that only traces, as `jit(f).lower`, does not run the collective. The process may
        trace that alone, for a log, while others wait with the collective that they run: it goes
        on, and they wait until it comes.

        Raises:
          RuntimeError: processes wait for each other with descriptions that differ, and all of them
            raise it; or others went on with one that differs, and do not come.
        """
        with _errors_as_warnings():
            with self._lock:  # held while a group begins, but not while a process waits
                if processes not in self._groups:
                    self._groups[processes] = _Group(self.client, self._process, processes)
            self._groups[processes].agree(description, only_traces)


class _Group:
    """Descriptions that one process has compared with those of a group.

    Threads share its containers, and change them by single operations.
    """

    def __init__(self, client: Any, process: int, processes: tuple[int, ...]):
        self._process, self._processes = process, processes
        self._ledger = Ledger(client, process, _digest(repr(processes)))
        self._known: set[str] = set()
        self._compiled: set[str] = set()
        self._unanswered: dict[str, int] = {}  # round by digest, of the last ones that went on
        self._patience: float | None = None

    def agree(self, description: Description, only_traces: bool) -> None:
        """Compare a description, unless it is known, and wait for others behind the compiler."""
        text = _packed(description)
        digest = _digest(text)
        if digest not in self._known:
            self._agree_on_new(digest, text, description, only_traces)
        compiling.after_compiling(functools.partial(self._on_compiled, digest, description))

    def _agree_on_new(
        self, digest: str, text: str, description: Description, only_traces: bool
    ) -> None:
        """Compare a description; warn if it stays unanswered."""
        start = time.monotonic()
        try:
            self._settle()
            self._ledger.publish(digest, text)
            verdict = self._compare(digest, only_traces)
        except jax.errors.JaxRuntimeError:
            self._known.add(digest)
            raise
        if verdict.entries:
            self._ledger.close_wait(digest)
            raise RuntimeError(self._difference(verdict))
        self._known.add(digest)
        missing = () if verdict == AGREED else self._missing(self._ledger.record(digest))
        self._patience = SHORT_PATIENCE if missing else None
        if missing:
            seconds = time.monotonic() - start
            warning = disagreement.unanswered(description, sorted(missing), seconds)
            warnings.warn(warning, stacklevel=4)

    def _on_compiled(self, digest: str, description: Description, runs: bool) -> None:
        """Show that a program with a description is compiled, and wait for others that traced it.

        A process that is about to run it would wait for the others anyway, or fail.
        """
        if digest in self._compiled:
            return
        with _errors_as_warnings():
            self._ledger.compiled(digest)
            if runs:
                self._compiled.add(digest)
                self._await_programs(digest, description)

    def _await_programs(self, digest: str, description: Description) -> None:
        start, is_silent = time.monotonic(), True
        while others := self._ledger.record(digest).compiling:
            seconds = time.monotonic() - start
            if seconds > COMPILING:
                return
            if seconds >= PATIENCE and is_silent:
                is_silent = False
                warnings.warn(disagreement.compiling(description, others, seconds), stacklevel=2)
            self._ledger.await_program(digest, others[0], PATIENCE)

    def _settle(self) -> None:
        """Raise a difference that late processes found after this process had gone on."""
        for digest, number in list(self._unanswered.items()):
            self._unanswered.pop(digest, None)
            # This process traces again, so it is not stuck there.
            self._ledger.close_wait(digest)
            if verdict := self._ledger.record(digest).late.get(number):
                self._known.discard(digest)
                raise RuntimeError(self._difference(verdict))

    def _compare(self, digest: str, only_traces: bool) -> Verdict:
        """Return the verdict about a description, once there is one about this process."""
        while True:
            number, record = self._come(digest)
            if self._missing(record):
                verdict = self._await(digest, number, only_traces)
            else:
                self._ledger.decide(digest, record.next_round, AGREED)
                verdict = AGREED
            if not verdict.entries or verdict.has(self._process, digest):
                return verdict

    def _come(self, digest: str) -> tuple[int, DescriptionRecord]:
        """Enter the first round without a verdict, or any if all processes are present."""
        number = 0
        while True:
            self._ledger.come(digest, number)
            record = self._ledger.record(digest)
            if number not in record.verdicts or not self._missing(record):
                return number, record
            number = record.next_round

    def _missing(self, record: DescriptionRecord) -> set[int]:
        return {*self._processes} - {*record.present}

    def _await(self, digest: str, number: int, only_traces: bool) -> Verdict:
        """Wait for a verdict, and decide if none comes in time."""
        verdict = self._ledger.await_verdict(digest, number, _GLANCE)
        if verdict is None or verdict == WENT_ON:
            self._ledger.open_wait(digest, number, _is_only_thread(), only_traces)
            verdict = verdict or self._await_others(digest, number, only_traces)
            if verdict == WENT_ON:
                self._unanswered[digest] = number
            else:
                self._ledger.close_wait(digest)
        return verdict

    def _await_others(self, digest: str, number: int, only_traces: bool) -> Verdict:
        def stands(wait: Wait) -> bool:
            """Return whether the other process waits as this one does."""
            return not wait.is_over and wait.only_traces == only_traces

        def may_come(wait: Wait) -> bool:
            """Return whether the other process may come later, or be stuck elsewhere."""
            if only_traces and not wait.only_traces:
                return False  # it waits, or is stuck, until this process has traced and comes
            return not wait.is_over or time.time() - wait.since < _HELD

        # Processes whose only thread waits for another one can never come.
        verdict = self._find(digest, lambda wait: stands(wait) and wait.only_thread)
        if verdict is None or not _is_only_thread():
            patience = PATIENCE if self._patience is None else self._patience
            verdict = self._ledger.await_verdict(digest, number, max(patience - _GLANCE, 0))
            verdict = verdict or self._find(digest, stands)
        if verdict is None and self._find(digest, may_come):
            verdict = self._ledger.await_verdict(digest, number, DOUBT)
            verdict = verdict or self._find(digest, may_come)
        return self._decide(digest, number, verdict or WENT_ON)

    def _find(self, digest: str, counts: Callable[[Wait], bool]) -> Verdict | None:
        """Return the difference if each missing process waits with another description."""
        record = self._ledger.record(digest)
        missing = self._missing(record)
        others: dict[int, Wait] = {}
        for wait in self._ledger.waits():
            entry = wait.entry
            # This process has traced those that it knows: they are no difference.
            if entry.process in missing and entry.digest not in self._known and counts(wait):
                others.setdefault(entry.process, wait)
        if not missing or missing != {*others}:
            return None
        present = [Entry(process, digest, number) for process, number in record.present.items()]
        entries = sorted([*present, *(wait.entry for wait in others.values())])
        is_late = any(wait.is_over for wait in others.values()) or any(
            record.verdicts.get(entry.round) == WENT_ON for entry in present
        )
        return Verdict("differ late" if is_late else "differ", tuple(entries))

    def _decide(self, digest: str, number: int, verdict: Verdict) -> Verdict:
        """Write a verdict to its rounds, and return the verdict that holds for this process."""
        if not verdict.entries:
            return self._ledger.decide(digest, number, verdict)
        # In the same order everywhere, so that of two processes that decide one is the first.
        for of_round in sorted({entry[1:] for entry in verdict.entries}):
            standing = self._ledger.decide(*of_round, verdict)
            if standing == WENT_ON:
                self._ledger.decide_late(*of_round, verdict)
            elif standing.has(self._process, digest):
                verdict = standing
        return verdict

    def _difference(self, verdict: Verdict) -> str:
        known = {
            digest: _unpacked(self._ledger.description(digest, _REPLY))
            for digest in {entry.digest for entry in verdict.entries}
        }
        descriptions = {entry.process: known[entry.digest] for entry in verdict.entries}
        return disagreement.difference(descriptions, verdict.kind == "differ late")


@contextlib.contextmanager
def _errors_as_warnings() -> Iterator[None]:
    """Warn of errors of the coordination service, which have to stop no step."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = f"The coordination service reports an error: {error!s:.200}"
        warnings.warn(disagreement.unchecked(reason), stacklevel=4)


def _is_only_thread() -> bool:
    return threading.active_count() == 1


def _packed(description: Description) -> str:
    """Return a description as text: a large model has thousands of leaves."""
    text = json.dumps(description)
    return base64.b85encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> Description:
    return json.loads(zlib.decompress(base64.b85decode(text)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
