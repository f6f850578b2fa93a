"""Losses of the training runs in a result file, by method."""

from statistics import fmean
from typing import Any


def final(row: dict[str, Any]) -> float:
    """Return the last held-out loss of a run."""
    return list(row["held_out"].values())[-1]


def by_method(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average the runs of each method over its seeds.

    Returns:
      For each method its name, its number of "seeds", the final "loss" of the first one, how far
      "off" the loss of the exact run of the same seed it is in the mean (None without one) and for
      "each" seed, the "error", and the "bytes" of a step.
    """
    exact = {row["seed"]: final(row) for row in rows if row["method"] == "exact"}
    means = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        off = [final(row) / exact[row["seed"]] - 1 for row in own if row["seed"] in exact]
        means.append(
            {
                "method": method,
                "seeds": len(own),
                "loss": final(min(own, key=lambda row: row["seed"])),
                "off": fmean(off) if off else None,
                "each": off,
                "error": fmean(row["error"] for row in own),
                "bytes": own[0]["bytes"],
            }
        )
    return means
