"""Plot of the losses of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.llm.run import Record

# Exact below compressed, and wide enough to be seen.
_STYLES = (
    {"color": "#9aa5b1", "lw": 3.0, "markersize": 11.0},
    {"color": "#d9480f", "lw": 1.2, "markersize": 6.0},
)


def plot_losses(path: Path, runs: Mapping[str, Sequence[Record]]) -> None:
    """Draw the training losses of one or two runs as lines, and held-out losses as points.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    for (name, records), style in zip(runs.items(), _STYLES[-len(runs) :], strict=True):
        axis.plot(*_points(records, "loss"), label=name, **style)
        held_out = _points(records, "evaluation_loss")
        axis.plot(*held_out, "o", label=f"{name}, held out", **style)
    axis.set(xlabel="step", ylabel="loss")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _points(records: Sequence[Record], field: str) -> tuple[list[int], list[float]]:
    having = [record for record in records if field in record]
    return [record["step"] for record in having], [record[field] for record in having]
