"""Starts the scripts beside the tests as processes that join each other on this machine."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

HERE = pathlib.Path(__file__).parent
TIMEOUT = 150  # seconds until a process has to have ended, for what takes about ten


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    script: str, arguments: Sequence[Sequence[object]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each row of arguments, after a common port and its rank. None is left."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    paths = (str(HERE.parents[1]), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, own in enumerate(arguments):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / script), *map(str, (port, rank, *own))],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def errors_of(process: subprocess.Popen[str]) -> str:
    """What a process wrote to standard error, once it has ended by itself."""
    return process.communicate(timeout=TIMEOUT)[1]


def run(script: str, arguments: Sequence[Sequence[object]]) -> None:
    """Runs them to their end; none may fail."""
    with running(script, arguments) as processes:
        for process in processes:
            errors = errors_of(process)
            assert process.returncode == 0, errors[-4000:]
