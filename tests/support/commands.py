"""`dynamiq-jax` in a process of its own, and its tables."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from dynamiq_jax._commands import main

ROOT = pathlib.Path(__file__).parents[2]


def command(
    *arguments: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `dynamiq-jax` with arguments, from a folder that is not the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "dynamiq_jax", *arguments],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """Run `dynamiq-jax` in this process; return its exit status, or what it ends with."""
    monkeypatch.setattr(sys, "argv", ["dynamiq-jax", *arguments])
    try:
        main()
    except SystemExit as ended:
        return ended.code
    return 0


def on_two_processes(path: pathlib.Path, *arguments: str) -> tuple[str, str, dict[str, Any]]:
    """Return what `dynamiq-jax` prints in two processes that join, and what it writes to a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    join = ("--json", str(path), "--coordinator", coordinator, "--num-processes", "2")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(command, *arguments, *join, "--process-id", str(rank)) for rank in range(2)
        ]
        first, second = (run.result() for run in runs)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    return first.stdout, second.stdout, json.loads(path.read_text())


def shown(*renderables) -> str:
    """Return what a wide terminal shows."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(*renderables)
    return capture.get()
