"""What every benchmark shares: timing, a description of the machine, and where results go."""

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dynamiq_jax._workshop import environment as cli_environment

RESULTS = Path(__file__).parent / "results"


def median_seconds(function: Callable[..., Any], *args: Any, repeats: int = 15) -> float:
    """Median wall time of a call, compiled and warm, until its result is ready."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def environment() -> dict[str, Any]:
    """Hardware, versions and date, to be kept with every result, and the commit."""
    known = cli_environment.environment(jax.devices()[0].device_kind)
    return known | {"commit": _commit(), "platform": jax.default_backend()}


def save(name: str, config: dict[str, Any], results: Any) -> Path:
    """Writes a result with its environment and config; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    return write(RESULTS / f"{name}.json", config, results)


def write(path: Path, config: dict[str, Any], results: Any) -> Path:
    """As `save`, to any file."""
    record = {"environment": environment(), "config": config, "results": results}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return path


def _commit() -> str:
    if shutil.which("git") is None:  # as in many images
        return ""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
