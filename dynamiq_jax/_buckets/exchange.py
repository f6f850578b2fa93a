"""Exchange of descriptions between the processes of a job, and errors where they differ."""

import base64
import collections
import contextlib
import hashlib
import json
import threading
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

PATIENCE = 60.0  # seconds to wait for other processes, which may still load their data
_REPLY = 10.0  # seconds to wait for a description whose digest is there already
_SHOWN = 10  # fields that an error lists
_SHOWN_LENGTH = 300  # characters of a value in an error

Description = Mapping[str, str]  # field to value; readable, as errors show them


class Exchange:
    """Descriptions of one process, each compared once with those of the other processes.

    The n-th new description of each process is compared with the n-th of the others. A process
    sends four small messages to the coordination service for each: the description, its digest, an
    arrival at a barrier, and a request for the digests of all processes. Descriptions of others are
    requested only where digests differ.
    """

    def __init__(self, client: Any, process: int):
        """Begin without any description.

        Args:
          client: client of the coordination service.
          process: number of this process.
        """
        self.client = client
        self._process = process
        self._agreed: set[tuple[tuple[int, ...], str]] = set()
        self._numbers: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._lock = threading.Lock()  # threads that trace take turns, each with a number

    def agree(self, description: Description, processes: tuple[int, ...]) -> None:
        """Compare a new description with those of other processes; return at once for a known one.

        Processes that do not come within `PATIENCE` seconds cause a warning. They compare their own
        description when they come. A description that differs is not remembered: the next call with
        it is compared with the next descriptions of the others.

        Args:
          description: what has to be the same.
          processes: numbers of the processes that compare, ascending, this one among them.

        Raises:
          RuntimeError: the descriptions of two processes differ. All processes raise it.
        """
        text = _packed(description)
        digest = _digest(text)
        with self._lock:
            if (processes, digest) in self._agreed:
                return
            start = time.monotonic()
            try:
                digests = self._digests(text, digest, processes)
            except jax.errors.JaxRuntimeError as error:
                self._end(processes, digest)
                _warn(f"The coordination service reports an error: {error!s:.200}")
                return
            if others := {*digests.values()} - {digest}:
                self._numbers[processes] += 1
                known = {digest: description, **{one: self._description(one) for one in others}}
                raise RuntimeError(difference({p: known[d] for p, d in digests.items()}))
            self._end(processes, digest)
        if missing := sorted({*processes} - {*digests}):
            waited = time.monotonic() - start
            _warn(f"After {waited:.0f} s, {named(missing)} had not traced the same step.")

    def _end(self, processes: tuple[int, ...], digest: str) -> None:
        self._numbers[processes] += 1
        self._agreed.add((processes, digest))

    def _digests(self, text: str, digest: str, processes: tuple[int, ...]) -> dict[int, str]:
        """Publish a description and return the digests of all processes that have come."""
        place = f"{_ROOT}/{_digest(repr(processes))}/{self._numbers[processes]}"
        # Equal descriptions have one place. A process that restarts publishes its own again.
        self.client.key_value_set(_place(digest), text, allow_overwrite=True)
        self.client.key_value_set(f"{place}/{self._process}", digest, allow_overwrite=True)
        # It raises an error if some do not come in time, or this process comes after that time.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.client.wait_at_barrier(f"{place}/all", int(1000 * PATIENCE), list(processes))
        entries = self.client.key_value_dir_get(f"{place}/")
        return {int(key.rpartition("/")[2]): value for key, value in entries}

    def _description(self, digest: str) -> Description:
        text = self.client.blocking_key_value_get(_place(digest), int(1000 * _REPLY))
        return _unpacked(text)


_ROOT = "dynamiq_jax/agreement"


def _place(digest: str) -> str:
    return f"{_ROOT}/descriptions/{digest}"


def difference(descriptions: Mapping[int, Description]) -> str:
    """Return the error for descriptions that differ, by process."""
    fields = dict.fromkeys(field for each in descriptions.values() for field in each)
    lines, differing = [], set[str]()
    for field in fields:
        if field.rpartition(".")[0] in differing:  # of objects of different kinds
            differing.add(field)
            continue
        by_value: dict[str, list[int]] = {}
        for process, description in sorted(descriptions.items()):
            by_value.setdefault(description.get(field, "nothing"), []).append(process)
        if len(by_value) > 1:
            differing.add(field)
            values = (f"{v:.{_SHOWN_LENGTH}} in {named(each)}" for v, each in by_value.items())
            lines.append(f"  {field}: {'; '.join(values)}")
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  and {len(lines) - _SHOWN} more"]
    return "\n".join(
        [
            "The processes of this job disagree about a collective. Nothing was sent.",
            *lines,
            "Give all processes the same program, arguments, flags and versions, and let all trace "
            "their steps in the same order. dq.Options(check_agreement=False) switches this check "
            "off.",
        ]
    )


def named(processes: Sequence[int]) -> str:
    """Return the name of some processes, ascending.

    >>> named([3]), named([0, 1, 2, 5])
    ('process 3', 'processes 0-2, 5')
    """
    runs: list[list[int]] = []
    for process in processes:
        if runs and runs[-1][-1] == process - 1:
            runs[-1][1:] = [process]
        else:
            runs.append([process])
    listed = ", ".join("-".join(map(str, run)) for run in runs)
    return f"process{'es' if len(processes) > 1 else ''} {listed}"


def _warn(reason: str) -> None:
    warnings.warn(
        f"{reason} It was not checked that all processes run the same collective. If they do not, "
        "they hang or their results are wrong. dq.Options(check_agreement=False) switches this "
        "check off.",
        stacklevel=2,
    )


def _packed(description: Description) -> str:
    """Return a description as text: a large model has thousands of leaves."""
    text = json.dumps(description)
    return base64.b85encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> Description:
    return json.loads(zlib.decompress(base64.b85decode(text)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
