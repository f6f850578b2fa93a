"""Plots of results: bars of times, and errors against bits, time and workers."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamiq_jax._console.units import format_seconds


def save_bars(path: Path | None, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draw seconds as bars to a file, if a path is given.

    Args:
      path: the file.
      title: label of the time axis.
      groups: label of a group of bars to label of a bar to seconds.
    """
    if path is None:
        return
    with figure_of(path, len(groups), 1) as (figure, axes):
        figure.set_size_inches(8, sum(0.9 + 0.3 * len(bars) for bars in groups.values()))
        figure.set_layout_engine("constrained")
        for axis, (label, bars) in zip(axes[:, 0], groups.items(), strict=True):
            drawn = axis.barh(list(bars), [1e3 * s for s in bars.values()], color="#1864ab")
            axis.bar_label(drawn, [format_seconds(s) for s in bars.values()], padding=3)
            axis.invert_yaxis()
            axis.set_title(label, loc="left")
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.12)
        axes[-1, 0].set_xlabel(f"{title} (ms)")


def save_errors(path: Path | None, rows: Sequence[dict[str, Any]], link: str) -> None:
    """Draw vNMSE against bits, time and workers to a file, if a path is given.

    Args:
      path: the file.
      rows: rows of `comparison`.
      link: the link that times are for, in words.
    """
    if path is None:
        return
    most = max(row["workers"] for row in rows)
    scale = "log" if any(row["vnmse"] > 0 for row in rows) else "linear"
    rows = [row for row in rows if scale == "linear" or row["vnmse"] > 0]
    at_most = [row for row in rows if row["workers"] == most]
    panels = [
        (at_most, "bits", "bits per coordinate on the wire", f"{most} workers"),
        (at_most, "seconds", f"seconds of one all-reduce on {link}", f"{most} workers"),
    ]
    if len({row["workers"] for row in rows}) > 1:
        panels.append((list(rows), "workers", "workers", "all budgets"))
    with figure_of(path, 1, len(panels)) as (figure, axes):
        figure.set_size_inches(5.5 * len(panels), 5)
        styles = _styles(rows)
        for axis, (drawn, key, label, title) in zip(axes[0], panels, strict=True):
            _draw_errors(axis, drawn, key, styles)
            axis.set(xlabel=label, ylabel="vNMSE", yscale=scale, title=title)
            if key != "bits":
                axis.set_xscale("log")
            if key == "workers":
                counts = sorted({row["workers"] for row in drawn})
                axis.set_xticks(counts, [str(count) for count in counts], minor=False)
                axis.minorticks_off()
            axis.grid(alpha=0.3)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.set_layout_engine("constrained")


@contextlib.contextmanager
def figure_of(path: Path, rows: int, columns: int) -> Iterator[tuple[Any, Any]]:
    """Make a figure with its axes [rows, columns], and save it after the `with` block."""
    import matplotlib

    matplotlib.use("Agg")  # The plot goes to a file: no display is needed.
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, squeeze=False)
    yield figure, axes
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_errors(
    axis: Any, rows: Sequence[dict[str, Any]], key: str, styles: dict[Any, dict[str, Any]]
) -> None:
    for family, style in styles.items():
        points = [row for row in rows if _family(row) == family]
        # Budgets of a family make a line; against workers, each method its own.
        lines = [points]
        if key == "workers":
            methods = {row["method"] for row in points}
            lines = [[row for row in points if row["method"] == method] for method in methods]
        for index, line in enumerate(lines):
            ordered = sorted(line, key=lambda row: row["bits" if key == "seconds" else key])
            axis.plot(
                [row[key] for row in ordered],
                [row["vnmse"] for row in ordered],
                label=" ".join(family) if index == 0 else None,
                **style,
            )


def _styles(rows: Sequence[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    from matplotlib import pyplot as plt

    families = sorted({_family(row) for row in rows})
    return {
        family: {"color": plt.colormaps["tab20"](i % 20), "marker": "os^vD<>Pp*hX"[i % 12]}
        for i, family in enumerate(families)
    }


def _family(row: dict[str, Any]) -> tuple[str, str]:
    return row["method"].split(":")[0], row["topology"]
