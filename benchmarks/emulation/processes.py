"""Processes that are started, asked, watched and ended together.

Every process reads requests, one JSON object a line, from its standard input and answers each with
one line on its standard output. When one of them ends, or one does not answer in time, all end.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dynamiq_jax._console.errors import CommandError

_GRACE = 1.0  # seconds in which the others show that they failed too, to tell the first from these
_TAIL = 2000  # characters of what a process wrote that an error shows


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which started it, ends for any reason."""
    prctl_set_death_signal = 1
    ctypes.CDLL(None).prctl(prctl_set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


class Processes:
    """Running processes, for the time of a `with` block.

    Args:
      commands: one command line for each host.
      environment: variables of all of them.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str]):
        self._commands, self._environment = commands, environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[bytes] = [b"" for _ in commands]  # read, but not a whole line yet
        self._logs = tempfile.TemporaryDirectory(prefix="dynamiq-jax-")

    def __enter__(self) -> "Processes":
        try:
            for host, command in enumerate(self._commands):
                with open(self._log(host), "wb") as log:
                    process = subprocess.Popen(
                        command,
                        env=self._environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C goes to this process alone
                    )
                self._processes.append(process)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, request: dict[str, Any], *, timeout: float, doing: str) -> list[dict[str, Any]]:
        """Send a request to all processes and return their answers, by host.

        Args:
          request: the request.
          timeout: seconds until all have to have answered.
          doing: what is done, in words, for the error.

        Raises:
          CommandError: a process ended, failed or did not answer in time. All have been ended.
        """
        line = json.dumps(request).encode() + b"\n"
        deadline = time.monotonic() + timeout
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended, as reading will show
                process.stdin.write(line)
                process.stdin.flush()
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for host, process in enumerate(self._processes):
                selector.register(process.stdout or -1, selectors.EVENT_READ, host)
            while len(answers) < len(self._processes):
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    host = key.data
                    received = os.read(key.fd, 65536)
                    self._lines[host] += received
                    if not received:
                        self._fail(doing, answers)
                    if b"\n" in self._lines[host]:
                        whole, _, self._lines[host] = self._lines[host].partition(b"\n")
                        answers[host] = json.loads(whole)
                        selector.unregister(key.fileobj)
                        if "error" in answers[host]:
                            self._fail(doing, answers)
                if len(answers) < len(self._processes) and time.monotonic() >= deadline:
                    missing = [h for h in range(len(self._processes)) if h not in answers]
                    self._fail_late(missing, timeout, doing)
        return [answers[host] for host in range(len(self._processes))]

    def end(self) -> None:
        """End all processes, whatever they do, and wait for them."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]
        self._logs.cleanup()

    def _fail(self, doing: str, answers: Mapping[int, dict[str, Any]]) -> NoReturn:
        """Find the process that failed first and raise; the errors of the others follow from it."""
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and None in [p.poll() for p in self._processes]:
            time.sleep(0.05)
        codes = {host: process.returncode for host, process in enumerate(self._processes)}
        killed = [h for h, code in codes.items() if code and code < 0 and code != -signal.SIGABRT]
        aborted = [h for h, code in codes.items() if code == -signal.SIGABRT]
        silent = [h for h, code in codes.items() if code is None and h not in answers]
        told = [h for h, answer in answers.items() if "error" in answer]
        if killed:
            what = f"{self._name(killed)} was killed by {signal.Signals(-codes[killed[0]]).name}"
        elif told:
            what = f"{self._name(told[:1])} failed with {answers[told[0]]['error']}"
        elif aborted and silent:  # JAX aborts those that are left
            what = (
                f"{self._name(silent)} hangs or cannot be reached, and JAX gave up waiting for it"
            )
        else:
            ended = [host for host, code in codes.items() if code is not None]
            log = self._log(ended[0]).read_text(errors="replace").strip()
            what = f"{self._name(ended[:1])} ended with status {codes[ended[0]]}:\n{log[-_TAIL:]}\n"
        self.end()
        raise CommandError(f"{what}, while {doing}. All processes were ended.")

    def _fail_late(self, missing: list[int], timeout: float, doing: str) -> NoReturn:
        self.end()
        raise CommandError(
            f"no answer from {self._name(missing)} for {timeout:.0f} s, while {doing}. A link "
            "stalls or a process hangs; if it is only slow, give a longer --timeout. All processes "
            "were ended."
        )

    def _name(self, hosts: Sequence[int]) -> str:
        return ", ".join(f"host {host} (process {self._processes[host].pid})" for host in hosts)

    def _log(self, host: int) -> Path:
        return Path(self._logs.name) / str(host)
