"""Result files, with the environment and the options of their measurement."""

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from dynamiq_jax._console import records
from dynamiq_jax._console.environment import environment as machine_and_versions
from dynamiq_jax._console.environment import of_cpu_programs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Describe the hardware, versions, date and commit of a result."""
    known = machine_and_versions(jax.devices()[0].device_kind)
    known |= {"commit": _commit(), "platform": jax.default_backend()}
    return known | of_cpu_programs() if jax.default_backend() == "cpu" else known


def stamp() -> dict[str, str]:
    """Return the date and the commit of a row, for result files that several runs fill."""
    known = environment()
    return {name: known[name] for name in ("date", "commit")}


def options_of(config: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the options that a result file keeps: all but its own path, and some others."""
    options = dataclasses.asdict(config)
    return {name: value for name, value in options.items() if name not in ("output", *but)}


def path_of(name: str) -> Path:
    """Return the path of a file of benchmarks/results, or of another house: "research/moshpit"."""
    house, _, name = name.rpartition("/")
    folder = ROOT / house / "benchmarks" / "results" if house else RESULTS
    return folder / f"{name}.json"


def write(path: Path, options: Mapping[str, Any], results: Any) -> Path:
    """Write a result with its environment and options to a file, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, environment(), options, results)
    return path


def earlier_results(path: Path, options: Mapping[str, Any], *, but: Collection[str]) -> Any:
    """Return the results of a file, to go on from there.

    Args:
      path: the file.
      options: options of the benchmark.
      but: options that may differ.

    Returns:
      The results; None if there is no file, or one of other options.
    """
    if not path.exists():
        return None
    earlier = json.loads(path.read_text())
    ours = json.loads(json.dumps(options, default=str))
    for each in (ours, earlier["config"]):
        for option in but:
            each.pop(option, None)
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
