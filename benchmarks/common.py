"""Timing, environment and result files of all benchmarks. Imports nothing but what the library
needs, as some benchmarks run on machines that have no more.
"""

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from dynamiq_jax._console import records
from dynamiq_jax._console.environment import environment as machine_and_versions

RESULTS = Path(__file__).parent / "results"


def median_seconds(function: Callable[..., Any], *args: Any, repeats: int = 15) -> float:
    """Return the median wall time of a call, compiled and warm, until its result is ready."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def environment() -> dict[str, Any]:
    """Describe the hardware, versions, date and commit of a result."""
    known = machine_and_versions(jax.devices()[0].device_kind)
    return known | {"commit": _commit(), "platform": jax.default_backend()}


def stamp() -> dict[str, str]:
    """Return the date and the commit of a row, for result files that several runs fill."""
    known = environment()
    return {name: known[name] for name in ("date", "commit")}


def save(name: str, config: dict[str, Any], results: Any) -> Path:
    """Write a result with its environment and config to benchmarks/results; return the path."""
    RESULTS.mkdir(exist_ok=True)
    return write(RESULTS / f"{name}.json", config, results)


def write(path: Path, config: dict[str, Any], results: Any) -> Path:
    """Write a result to any file, as `save` does."""
    records.write(path, environment(), config, results)
    return path


def earlier_results(name: str, config: dict[str, Any], *, but: Collection[str]) -> Any:
    """Return the results of a file of benchmarks/results, to go on from there.

    Args:
      name: name of the benchmark.
      config: its options.
      but: options that may differ.

    Returns:
      The results; None if there is no file, or one of other options.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    earlier = json.loads(path.read_text())
    ours = json.loads(json.dumps(config))
    for options in (ours, earlier["config"]):
        for option in but:
            options.pop(option, None)
    return earlier["results"] if earlier["config"] == ours else None


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
