"""The driver of processes that join each other on this machine: each calls one named function.

    ends = processes.run(worker.train, [(folder, "none")] * 2)

The function takes the rank of its process and the arguments of its row. Each process is one of a
job of JAX, with CPU devices of its own, and what the function returns comes back by pickle.
"""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import pkgutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT = 150  # seconds until a process has to have ended, for what takes about ten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of all processes of a job."""

    count: int
    port: int
    devices: int
    heartbeat: int
    joins: bool


class Process:
    """A process that calls a function, and its end."""

    def __init__(self, function: Callable[..., Any], rank: int, own: Sequence[Any], job: Job):
        self._folder = tempfile.TemporaryDirectory()
        self._file = pathlib.Path(self._folder.name, "call.pickle")
        name = f"{function.__module__}:{function.__qualname__}"
        self._file.write_bytes(pickle.dumps((name, rank, tuple(own), job)))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        paths = (str(ROOT), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes", str(self._file)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def returncode(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._popen.poll()

    def errors(self, timeout: float = TIMEOUT) -> str:
        """Wait for its end, and return what it wrote to standard error."""
        return self._popen.communicate(timeout=timeout)[1]

    def result(self, timeout: float = TIMEOUT) -> Any:
        """Wait for its end, and return the result of its function. A failure is an error here."""
        errors = self.errors(timeout)
        assert self.returncode == 0, errors[-4000:]
        return pickle.loads(_result_of(self._file).read_bytes())

    def kill(self) -> None:
        """End it by SIGKILL, stopped or not, and forget it."""
        self._popen.kill()
        if self._popen.stderr and not self._popen.stderr.closed:
            self._popen.communicate()
        self._folder.cleanup()


@contextlib.contextmanager
def running(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    *,
    devices: int = 1,
    heartbeat: int = 100,
) -> Iterator[list[Process]]:
    """Start one process for each row of arguments. None is left behind."""
    job = Job(
        count=len(arguments), port=free_port(), devices=devices, heartbeat=heartbeat, joins=True
    )
    processes: list[Process] = []
    try:
        for rank, own in enumerate(arguments):
            processes.append(Process(function, rank, own, job))
        yield processes
    finally:
        for process in processes:
            process.kill()


def alone(function: Callable[..., Any], *own: Any) -> Process:
    """Start a process of its own, with one device and without a job of JAX."""
    return Process(function, 0, own, Job(count=1, port=0, devices=1, heartbeat=0, joins=False))


def run(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    *,
    devices: int = 1,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Run processes to their end: none may fail. Return their results."""
    with running(function, arguments, devices=devices) as processes:
        return [process.result(timeout) for process in processes]


def free_port() -> int:
    """Find a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _result_of(file: pathlib.Path) -> pathlib.Path:
    return file.with_name("result.pickle")


def _main(file: pathlib.Path) -> None:
    name, rank, own, job = pickle.loads(file.read_bytes())
    if sys.platform == "linux":
        from benchmarks.emulation.processes import die_with_parent

        die_with_parent(os.getppid())  # also when stopped
    import jax

    jax.config.update("jax_num_cpu_devices", job.devices)
    if job.joins:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{job.port}",
            job.count,
            rank,
            initialization_timeout=60,
            heartbeat_timeout_seconds=job.heartbeat,
            shutdown_timeout_seconds=3,
        )
    result = pkgutil.resolve_name(name)(rank, *own)
    _result_of(file).write_bytes(pickle.dumps(result))
    if job.joins:
        jax.distributed.shutdown()


if __name__ == "__main__":
    # By its full name, as pickles have it.
    from tests.support.processes import _main as main

    main(pathlib.Path(sys.argv[1]))
