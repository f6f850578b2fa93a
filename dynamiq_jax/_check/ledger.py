"""Descriptions of processes and verdicts about them, in the coordination service of a job."""

import contextlib
import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

_ROOT = "dynamiq_jax/agreement"


class Entry(NamedTuple):
    """Description that a process compares, and the round in which it does so."""

    process: int
    digest: str
    round: int


class Verdict(NamedTuple):
    """End of a round: all processes agree, some did not come, or descriptions differ.

    They differ late if some processes went on before.
    """

    kind: Literal["agreed", "went on", "differ", "differ late"]
    entries: tuple[Entry, ...] = ()  # of all processes, if they differ

    def has(self, process: int, digest: str) -> bool:
        """Return whether a difference is about this description of a process."""
        return any(entry[:2] == (process, digest) for entry in self.entries)


AGREED, WENT_ON = Verdict("agreed"), Verdict("went on")


class DescriptionRecord(NamedTuple):
    """Record of one description."""

    present: Mapping[int, int]  # round of each process that runs the collective
    verdicts: Mapping[int, Verdict]  # by round
    late: Mapping[int, Verdict]  # differences found after processes of a round went on
    compiling: Sequence[int]  # processes that traced the program and have not compiled it yet

    @property
    def next_round(self) -> int:
        """The first round that has no verdict."""
        return max(self.verdicts, default=-1) + 1


class Wait(NamedTuple):
    """Wait of a process for the others."""

    entry: Entry
    since: float  # seconds of the clock
    only_thread: bool  # nothing else in the process can trace
    only_traces: bool  # the call does not run the collective
    is_over: bool = False  # the process went on


class Ledger:
    """Ledger of a group of processes, with keys made of the content of descriptions.

    A round of a description gets one verdict: the service refuses a second one.
    """

    def __init__(self, client: Any, process: int, group: str):
        self._client, self._process = client, process
        self._place = f"{_ROOT}/{group}"
        # Of a process of the same number, before it was restarted.
        client.key_value_delete(f"{self._place}/waits/{process}/")

    def publish(self, digest: str, text: str) -> None:
        """Write a description, for errors."""
        self._set(f"{_ROOT}/descriptions/{digest}", text)

    def description(self, digest: str, seconds: float) -> str:
        """Read a description that some process has published."""
        place = f"{_ROOT}/descriptions/{digest}"
        return self._client.blocking_key_value_get(place, int(1000 * seconds))

    def come(self, digest: str, number: int) -> None:
        """Enter a round of a description."""
        self._set(f"{self._place}/{digest}/came/{self._process}", str(number))

    def record(self, digest: str) -> DescriptionRecord:
        """Read the record of a description."""
        found: dict[str, dict[int, str]] = {"came": {}, "verdict": {}, "late": {}, "compiled": {}}
        for key, value in self._client.key_value_dir_get(f"{self._place}/{digest}/"):
            kind, number = key.split("/")[-2:]
            found[kind][int(number)] = value
        verdicts = {number: _verdict(value) for number, value in found["verdict"].items()}
        late = {number: _verdict(value) for number, value in found["late"].items()}
        rounds = {process: int(value) for process, value in found["came"].items()}
        # A difference prevents that a process runs the collective.
        present = {
            process: number
            for process, number in rounds.items()
            if not verdicts.get(number, AGREED).entries
        }
        return DescriptionRecord(present, verdicts, late, sorted({*present} - {*found["compiled"]}))

    def compiled(self, digest: str) -> None:
        """Record that this process has compiled the program of a description."""
        self._set(f"{self._place}/{digest}/compiled/{self._process}", "")

    def await_program(self, digest: str, process: int, seconds: float) -> None:
        """Wait until another process has compiled the program of a description, or time is over."""
        place = f"{self._place}/{digest}/compiled/{process}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.blocking_key_value_get(place, int(1000 * seconds))

    def decide(self, digest: str, number: int, verdict: Verdict) -> Verdict:
        """Write the verdict of a round unless it has one, and return the one that stands."""
        place = f"{self._place}/{digest}/verdict/{number}"
        try:
            self._client.key_value_set(place, json.dumps(verdict))
        except jax.errors.JaxRuntimeError:
            if standing := self.record(digest).verdicts.get(number):
                return standing
            raise
        return verdict

    def decide_late(self, digest: str, number: int, verdict: Verdict) -> None:
        """Write a difference for processes that went on, which their next comparison reads."""
        self._set(f"{self._place}/{digest}/late/{number}", json.dumps(verdict))

    def await_verdict(self, digest: str, number: int, seconds: float) -> Verdict | None:
        """Wait for the verdict of a round; return None if there is none in time."""
        place = f"{self._place}/{digest}/verdict/{number}"
        try:
            return _verdict(self._client.blocking_key_value_get(place, int(1000 * seconds)))
        except jax.errors.JaxRuntimeError:  # a service that is gone fails in the next call too
            return None

    def open_wait(self, digest: str, number: int, only_thread: bool, only_traces: bool) -> None:
        """Record that this process waits; see `Wait`."""
        text = json.dumps([number, time.time(), only_thread, only_traces])
        self._set(f"{self._place}/waits/{self._process}/{digest}", text)

    def close_wait(self, digest: str) -> None:
        """Remove what `open_wait` wrote."""
        self._client.key_value_delete(f"{self._place}/waits/{self._process}/{digest}")

    def waits(self) -> list[Wait]:
        """Read the waits of all processes, the oldest first, also of processes that went on."""
        found = []
        record = functools.cache(self.record)
        for key, value in self._client.key_value_dir_get(f"{self._place}/waits/"):
            process, digest = key.split("/")[-2:]
            number, since, only_thread, only_traces = json.loads(value)
            verdict = record(digest).verdicts.get(number)
            if verdict in (None, WENT_ON):
                entry = Entry(int(process), digest, number)
                found.append(Wait(entry, since, only_thread, only_traces, verdict == WENT_ON))
        return sorted(found, key=lambda wait: wait.since)

    def _set(self, place: str, value: str) -> None:
        self._client.key_value_set(place, value, allow_overwrite=True)


def _verdict(text: str) -> Verdict:
    kind, entries = json.loads(text)
    return Verdict(kind, tuple(Entry(*entry) for entry in entries))
