"""What `dynamiq-jax compare` draws: error against bits, against time, against workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save(path: Path | None, rows: Sequence[dict[str, Any]], link: str) -> None:
    """Draws to a file, if a path is given.

    Args:
      path: where to.
      rows: as of the JSON file.
      link: what times are for.
    """
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")  # The plot goes to a file: no display is needed.
    from matplotlib import pyplot as plt

    most = max(row["workers"] for row in rows)
    at_most = [row for row in rows if row["workers"] == most]
    panels = [
        (at_most, "bits", "bits per coordinate on the wire", f"{most} workers"),
        (at_most, "seconds", f"seconds of one all-reduce on {link}", f"{most} workers"),
    ]
    if len({row["workers"] for row in rows}) > 1:
        panels.append((list(rows), "workers", "workers", "all budgets"))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 5), squeeze=False)
    families = sorted({(_family(row), row["topology"]) for row in rows})
    style = {
        family: (plt.colormaps["tab20"](index % 20), "os^vD<>Pp*hX"[index % 12])
        for index, family in enumerate(families)
    }
    for axis, (drawn, key, label, title) in zip(axes[0], panels, strict=True):
        for family in families:
            points = [r for r in drawn if (_family(r), r["topology"]) == family and r["vnmse"] > 0]
            # Budgets of a family make a line; against workers, each method its own.
            lines = (
                [[r for r in points if r["method"] == m] for m in {r["method"] for r in points}]
                if key == "workers"
                else [points]
            )
            colour, marker = style[family]
            for index, line in enumerate(lines):
                ordered = sorted(line, key=lambda row: row["bits" if key == "seconds" else key])
                axis.plot(
                    [row[key] for row in ordered],
                    [row["vnmse"] for row in ordered],
                    color=colour,
                    marker=marker,
                    label=" ".join(family) if index == 0 else None,
                )
        axis.set(xlabel=label, ylabel="vNMSE", yscale="log", title=title)
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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _family(row: dict[str, Any]) -> str:
    return row["method"].split(":")[0]
