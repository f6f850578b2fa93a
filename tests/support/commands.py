"""`dynamiq-jax` in a process of its own, and its tables."""

import os
import pathlib
import subprocess
import sys

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
