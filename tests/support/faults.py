"""Deliberate faults in a copy of the project, and what notices them."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("pallas_kernels", "dynamiq_jax", "benchmarks", "tests")
PATIENCE = 600.0  # seconds for one run of Python


def copy_project(folder: Path) -> None:
    """Copy the packages of the project, without what was compiled."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)


@contextlib.contextmanager
def faulty(path: Path, old: str, new: str) -> Iterator[None]:
    """Replace a text that a file has once, as long as the context is open."""
    right = path.read_text()
    if right.count(old) != 1:
        raise ValueError(f"{path.name} has {old!r} {right.count(old)} times, not once")
    path.write_text(right.replace(old, new))
    try:
        yield
    finally:
        path.write_text(right)


def errors(folder: Path, *command: str) -> str:
    """Run Python in a copy; return what it wrote if it failed, and nothing if it did not."""
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    return (done.stdout.strip() or f"exit status {done.returncode}") if done.returncode else ""
