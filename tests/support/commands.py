"""`dynamiq-jax` in a process of its own, its tables, and programs that compile quickly."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax
from rich.console import Console

ROOT = pathlib.Path(__file__).parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `dynamiq-jax` with arguments, from a folder that is not the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "dynamiq_jax", *arguments],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def shown(*renderables) -> str:
    """Return what a wide terminal shows."""
    console = Console(width=160)
    with console.capture() as capture:
        console.print(*renderables)
    return capture.get()


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Compile without most optimizations, where that would be most of the time of a test."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
