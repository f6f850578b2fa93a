"""Plots of compute thresholds: the gain against the threshold, and times of steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLUE, ORANGE, GRAY = "#1864ab", "#e8590c", "#868e96"


def draw_steps(axis: Any, before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
    """Draw the distribution of the times of steps.

    Args:
      axis: axis of matplotlib.
      before: seconds of held-out steps without a threshold, [steps].
      after: seconds of the same steps with it, [steps].
    """
    low, high = min(before.min(), after.min()), max(before.max(), after.max())
    bins = np.linspace(low, high, 30) if high > low else 30
    for values, label, color in ((before, "no threshold", GRAY), (after, "threshold", BLUE)):
        shown = f"{label}, mean {values.mean():.3g} s"
        axis.hist(values, bins, alpha=0.7, label=shown, color=color)
    axis.set(xlabel="seconds of a step", ylabel="steps", title="Steps not used to choose")
    axis.legend(frameon=False)


def draw_sweep(axis: Any, rows: Sequence[Mapping[str, float | None]], threshold: float) -> None:
    """Draw speed-up and drop rate against the threshold.

    Args:
      axis: axis of matplotlib.
      rows: rows of `prediction.sweep`.
      threshold: the chosen one, seconds; may be inf.
    """
    at = [row["threshold"] for row in rows]
    lines = (
        ("speedup", "replayed: check between micro-batches", {"color": BLUE, "lw": 2.5}),
        ("law", "its law", {"color": BLUE, "ls": ":", "lw": 2}),
        ("cut_speedup", "replayed: cut off at the threshold", {"color": ORANGE, "lw": 1.2}),
        ("cut_law", "its law (paper)", {"color": ORANGE, "ls": ":", "lw": 1.5}),
    )
    for name, label, style in lines:
        values = [row[name] for row in rows]
        if None not in values:
            axis.plot(at, values, label=label, **style)
    dropped = axis.twinx()
    dropped.fill_between(at, [100 * (row["drop_rate"] or 0) for row in rows], color=GRAY, alpha=0.2)
    dropped.set(ylim=(0, 100), ylabel="micro-batches dropped (%, gray)")
    axis.axhline(1, color="black", lw=0.8)
    if np.isfinite(threshold):
        axis.axvline(threshold, color="#c92a2a", lw=1.5, label="chosen")
    axis.set(xlabel="threshold (seconds of accumulation)", ylabel="speed-up")
    axis.set_ylim(bottom=0.7)
    axis.set_title("Speed-up against the threshold")
    axis.set_zorder(dropped.get_zorder() + 1)  # lines over the gray area
    axis.patch.set_visible(False)
    axis.legend(frameon=False, fontsize=8)
