"""Emulated hosts: one small run, and what is left when a run is stopped or one of its processes
fails. Nothing may hang, and nothing may stay behind.
"""

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

from dynamiq_jax._workshop import namespaces
from dynamiq_jax._workshop.errors import CommandError
from tests.support.emulation import emulates

ROOT = pathlib.Path(__file__).parents[1]
HOSTS_FILES = pathlib.Path("/etc/netns")
TIMEOUT = 90  # seconds for what takes about ten on a free machine
PATIENCE = "60"  # seconds that the command waits for its processes; those that fail are noticed


class Command:
    """A running `dynamiq-jax network`."""

    def __init__(self, *arguments: str):
        options = ["--size", "64Ki", "--timeout", PATIENCE, *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamiq_jax", "network", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def namespaces(self) -> list[str]:
        return [name for name in all_namespaces() if f"-{self.process.pid}-" in name]

    def workers(self) -> list[int]:
        """Processes on its hosts."""
        found = []
        for name in self.namespaces():
            shown = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            found += [int(pid) for pid in shown.stdout.split()]
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_until_measuring(self) -> None:
        """Until bytes flow over limited links."""

        def flowing() -> bool:
            hosts = [name for name in self.namespaces() if name.endswith("-0")]
            if not hosts:
                return False
            show = ["tc", "-n", hosts[0], "-s", "-j", "qdisc", "show", "dev", "eth0"]
            shown = subprocess.run(show, capture_output=True, text=True, check=False).stdout
            disciplines = json.loads(shown or "[]")
            return any(d["kind"] == "tbf" and d["bytes"] > 20_000 for d in disciplines)

        self.wait_until(flowing)

    def end(self) -> tuple[int, str, str]:
        """Exit status, output and errors, once it has ended by itself."""
        output, errors = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, output, errors


def all_namespaces() -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in shown.stdout.splitlines()]


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


def assert_nothing_left(command: Command, workers: list[int]) -> None:
    assert command.namespaces() == []
    assert list(HOSTS_FILES.glob(f"dynamiq-{command.process.pid}-*")) == []
    assert [pid for pid in workers if pathlib.Path(f"/proc/{pid}").exists()] == []


# A minute: one all-reduce takes a second.
LONG = ("--hosts", "2", "--rate", "2mbit", "--settings", "psum", "--repeats", "60")


@emulates
def test_a_small_run(start, tmp_path):
    path = tmp_path / "out.json"
    settings = ("--settings", "psum", "bf16:ring", "dynamiq:6:widths=(4,8):ring")
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
    assert_nothing_left(command, [])


@emulates
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(start, number):
    command = start(*LONG)
    command.wait_until(lambda: len(command.workers()) == 2)
    workers = command.workers()
    command.process.send_signal(number)
    status, _, errors = command.end()
    assert status == 128 + number
    assert (
        errors.strip() == f"dynamiq-jax: stopped by {number.name}; everything it made is removed."
    )
    assert_nothing_left(command, workers)


@emulates
def test_a_killed_process_ends_all_with_an_error(start):
    command = start(*LONG)
    command.wait_until_measuring()
    workers = command.workers()
    os.kill(workers[-1], signal.SIGKILL)
    before = time.monotonic()
    status, _, errors = command.end()
    assert time.monotonic() - before < 30  # far less than the 60 s of its own time-out
    assert status == 1
    assert f"(process {workers[-1]}) was killed by SIGKILL, while measuring psum" in errors
    assert_nothing_left(command, workers)


@emulates
def test_a_stalled_link_ends_all_with_an_error(start):
    command = start(*LONG, "--timeout", "3")
    command.wait_until_measuring()
    workers = command.workers()
    victim = next(name for name in command.namespaces() if name.endswith("-1"))
    subprocess.run(["ip", "-n", victim, "link", "set", "eth0", "down"], check=True)
    status, _, errors = command.end()
    assert status == 1
    assert "no answer from host" in errors and "--timeout" in errors
    assert_nothing_left(command, workers)


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
    left = command.namespaces()
    with namespaces.emulated(1) as network:  # somebody else's, alive
        assert len(left) == 3
        assert set(left) <= set(namespaces.remove_stale())
        assert network.bytes_sent() is not None
    assert_nothing_left(command, workers)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CommandError, match="ip and tc not found: install iproute2"):
        namespaces.check_possible()
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: "/sbin/" + name)
    with pytest.raises(CommandError, match=r"need root.*user 1000.*sudo"):
        namespaces.check_possible()
