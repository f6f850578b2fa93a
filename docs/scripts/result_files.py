"""Result files of the benchmarks, and tables in Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def results_of(name: str) -> Any:
    """Read the results of a benchmark, or of one of another house: "research/moshpit"."""
    house, _, name = name.rpartition("/")
    path = ROOT / house / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text())["results"]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def exponent(value: float) -> str:
    """Write a number with two digits and a short exponent: 1.2e-3."""
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(power)}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Write a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
