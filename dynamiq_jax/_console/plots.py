"""Plots of results: bars of times, and errors against bits, time and workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamiq_jax._console.units import format_seconds


def save_bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draw seconds as bars to a file.

    Args:
      path: the file.
      title: label of the time axis.
      groups: label of a group of bars to label of a bar to seconds.
    """
    from matplotlib.figure import Figure

    height = sum(0.9 + 0.3 * len(bars) for bars in groups.values())
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axis, (label, bars) in zip(axes, groups.items(), strict=True):
        drawn = axis.barh(list(bars), [1e3 * s for s in bars.values()], color="#1864ab")
        axis.bar_label(drawn, [format_seconds(s) for s in bars.values()], padding=3)
        axis.invert_yaxis()
        axis.set_title(label, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[-1].set_xlabel(f"{title} (ms)")
    figure.savefig(path, dpi=150)


def save_errors(path: Path, rows: Sequence[dict[str, Any]], link: str) -> None:
    """Draw vNMSE against bits, time and workers to a file.

    Args:
      path: the file.
      rows: rows of `Comparison.row`.
      link: the link that times are for, in words.
    """
    import matplotlib
    from matplotlib.figure import Figure

    counts = sorted({row["workers"] for row in rows})
    scale = "log" if any(row["vnmse"] > 0 for row in rows) else "linear"
    rows = [row for row in rows if scale == "linear" or row["vnmse"] > 0]
    at_most = [row for row in rows if row["workers"] == counts[-1]]
    panels = [
        (at_most, "bits", "bits per coordinate on the wire", f"{counts[-1]} workers"),
        (at_most, "seconds", f"seconds of one all-reduce on {link}", f"{counts[-1]} workers"),
        (rows, "workers", "workers", "all budgets"),
    ][: 3 if len(counts) > 1 else 2]
    styles = {
        family: {"color": matplotlib.colormaps["tab20"](i % 20), "marker": "os^vD<>Pp*hX"[i % 12]}
        for i, family in enumerate(sorted({_family(row) for row in rows}))
    }
    figure = Figure(figsize=(5.5 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (drawn, key, label, title) in zip(axes, panels, strict=True):
        for family, style in styles.items():
            # Budgets of a family make a line; against workers, each method its own.
            lines: dict[str, list[dict[str, Any]]] = {}
            for row in drawn:
                if _family(row) == family:
                    lines.setdefault(row["method"] if key == "workers" else "", []).append(row)
            for index, line in enumerate(lines.values()):
                line.sort(key=lambda row: row["workers" if key == "workers" else "bits"])
                axis.plot(
                    [row[key] for row in line],
                    [row["vnmse"] for row in line],
                    label=" ".join(family) if index == 0 else None,
                    **style,
                )
        axis.set(xlabel=label, ylabel="vNMSE", yscale=scale, title=title)
        axis.grid(alpha=0.3)
        if key != "bits":
            axis.set_xscale("log")
        if key == "workers":
            axis.set_xticks(counts, [str(count) for count in counts], minor=False)
            axis.minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _family(row: dict[str, Any]) -> tuple[str, str]:
    return row["method"].split(":")[0], row["topology"]
