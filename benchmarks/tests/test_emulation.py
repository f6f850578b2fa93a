"""Emulated hosts: one small run, and what is left when a run is stopped or one of its processes
fails. Nothing may hang, and nothing may stay behind.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.emulation import namespaces
from benchmarks.emulation.processes import Processes
from benchmarks.tests.support.emulation import emulates
from dynamiq_jax._console.errors import CommandError

ROOT = pathlib.Path(__file__).parents[2]
HOSTS_FILES = pathlib.Path("/etc/netns")
TIMEOUT = 90  # seconds for what takes about ten on a free machine
PATIENCE = "60"  # seconds that the command waits for its processes; those that fail are noticed


class Command:
    """A running `python -m benchmarks.emulation`."""

    def __init__(self, *arguments: str):
        options = ["--size", "64Ki", "--timeout", PATIENCE, *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulation", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def workers(self) -> list[int]:
        """Processes on its hosts."""
        found = []
        for name in namespaces_of(self.process.pid):
            shown = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            found += map(int, shown.stdout.split())
        # Not the tools that look at a host's interface.
        return [process for process in found if "measuring_host" in command_line(process)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[int, str, str]:
        """Exit status, output and errors, once it has ended by itself."""
        output, errors = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, output, errors


def namespaces_of(process: int) -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in shown.stdout.splitlines()]
    return [name for name in names if f"-{process}-" in name]


def command_line(process: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{process}/cmdline").read_text()
    return ""


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """`start(*arguments)` runs the command. Whatever happens, it is ended and removed."""
    commands = []

    def run(*arguments: str) -> Command:
        commands.append(Command(*arguments))
        return commands[-1]

    yield run
    for command in commands:
        command.process.kill()
        command.process.communicate()
    namespaces.remove_stale()


def assert_nothing_left(process: int, workers: list[int]) -> None:
    assert namespaces_of(process) == []
    assert list(HOSTS_FILES.glob(f"dynamiq-{process}-*")) == []
    assert [pid for pid in workers if pathlib.Path(f"/proc/{pid}").exists()] == []


LONG = ("--hosts", "2", "--rate", "2mbit", "--settings", "psum", "--repeats", "60")


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="needs /proc of Linux")
def test_a_later_process_has_a_later_start():
    """A number that another process has now is told from the one that left something."""
    time.sleep(0.1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        ours, theirs = map(namespaces._start_time, (os.getpid(), later.pid))
        later.communicate(b"\n")
    assert ours < theirs
    assert namespaces._start_time(later.pid) is None


# ------------------------------------------------------------------------- the command


@emulates
def test_a_small_run(start, tmp_path):
    path = tmp_path / "out.json"
    settings = ("--settings", "psum", "bf16:ring", "bf16:all_to_all")
    options = ("--hosts", "2", "--rate", "100mbit", "200mbit", "--repeats", "2")
    command = start(*options, *settings, "--json", str(path))
    status, output, errors = command.end()
    assert status == 0, errors
    assert "2 hosts at 100 Mbit/s, 64Ki float32 coordinates" in output
    rows = json.loads(path.read_text())["results"]
    assert [(row["rate"], row["setting"]) for row in rows] == [
        (rate, name) for rate in (1e8, 2e8) for name in settings[1:]
    ]
    for row in rows:
        assert row["replicas_equal"] and row["hosts"] == 2 and len(row["repeats"]) == 2
        # Headers are a twentieth; JAX's heartbeats and barriers count in a message so small.
        assert 1.03 < row["overhead"] < 1.5
        assert row["wire_seconds"] == pytest.approx(8 * row["bytes_per_worker"] / row["rate"])
        assert row["seconds"] > 0.5 * row["wire_seconds"]
    assert rows[0]["vnmse"] < 1e-13 < rows[1]["vnmse"] < 1e-4
    assert set(rows[2]["speedup"]) == {"psum", "bf16:ring"}
    assert_nothing_left(command.process.pid, [])


@pytest.mark.slow
@emulates
def test_a_stopped_run_leaves_nothing(start):
    """benchmarks/tests/test_harness.py has the other signals."""
    command = start(*LONG)
    command.wait_until(lambda: len(command.workers()) == 2)
    workers = command.workers()
    command.process.send_signal(signal.SIGTERM)
    status, _, errors = command.end()
    assert status == 128 + signal.SIGTERM
    name = "python -m benchmarks.emulation"
    assert errors.strip() == f"{name}: stopped by SIGTERM; everything it made is removed."
    assert_nothing_left(command.process.pid, workers)


# ---------------------------------------------------------------- runs that cannot go on


ANSWERS = "import sys; [print('{}', flush=True) for line in sys.stdin]"
ERROR = """print('{"error": "ValueError: bad"}', flush=True)"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("import time; time.sleep(600)", r"no answer from host 1 \(process \d+\) for 2 s, while"),
        ("import os; os.kill(os.getpid(), 9)", r"host 1 \(process \d+\) was killed by SIGKILL, w"),
        ("exit('out of memory')", r"host 1 \(process \d+\) ended with status 1:\nout of memory\n,"),
        (ERROR, r"host 1 \(process \d+\) failed with ValueError: bad, while"),
    ],
    ids=("hangs", "killed", "ends", "fails"),
)
def test_the_process_that_failed_is_named(then, says):
    """And all are ended."""
    once = f"input(); print('{{}}', flush=True); input(); {then}"
    commands = [[sys.executable, "-c", program] for program in (ANSWERS, once)]
    with Processes(commands, os.environ) as processes:
        assert processes.ask({"do": "it"}, timeout=TIMEOUT, doing="starting") == [{}, {}]
        timeout = 2 if "sleep" in then else TIMEOUT
        with pytest.raises(CommandError, match=f"^{says}") as error:
            processes.ask({"do": "it"}, timeout=timeout, doing="asking")
        assert "while asking." in str(error.value)
        assert str(error.value).endswith("All processes were ended.")
        assert None not in [process.returncode for process in processes._processes]


def test_answers_are_by_host():
    program = "import sys; [print('{\"host\": %d}', flush=True) for line in sys.stdin]"
    commands = [[sys.executable, "-c", program % host] for host in (5, 3)]
    with Processes(commands, os.environ) as processes:
        for _ in range(2):
            answers = processes.ask({"do": "it"}, timeout=TIMEOUT, doing="asking")
            assert answers == [{"host": 5}, {"host": 3}]


# --------------------------------------------------------------------------- namespaces


@pytest.mark.slow
@emulates
def test_what_a_killed_command_left_is_removed_by_the_next(start):
    command = start(*LONG)
    command.wait_until(lambda: len(command.workers()) == 2)
    workers = command.workers()
    command.process.kill()
    command.process.communicate()
    deadline = time.monotonic() + TIMEOUT
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in workers):  # they die with it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    left = namespaces_of(command.process.pid)
    with namespaces.emulated(1) as network:  # somebody else's, alive
        assert len(left) == 3
        assert set(left) <= set(namespaces.remove_stale())
        assert network.bytes_sent() is not None
    assert_nothing_left(command.process.pid, workers)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CommandError, match="ip and tc not found: install iproute2"):
        namespaces.check_possible()
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: "/sbin/" + name)
    with pytest.raises(CommandError, match=r"need root.*user 1000.*sudo"):
        namespaces.check_possible()
