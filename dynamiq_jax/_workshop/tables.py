"""What every command shows and keeps: progress, tables, a JSON record, a plot."""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynamiq_jax._workshop.environment import environment
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.units import format_seconds

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def console(*, quiet: bool = False) -> Console:
    """Where a command writes. Wide enough for its tables where nobody looks at a terminal."""
    found = Console(quiet=quiet)
    return found if found.is_terminal else Console(quiet=quiet, width=160)


@contextlib.contextmanager
def progress(to: Console, phase: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar that goes once the phase is over; nothing where the output is no terminal.

    Yields:
      A function to call after every step, with what was done.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[message]}"),
    )
    hidden = not to.is_terminal or to.quiet
    with Progress(*columns, console=to, transient=True, disable=hidden) as bars:
        task = bars.add_task(phase, total=steps, message="")
        yield lambda message: bars.update(task, advance=1, message=message)


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table with left-aligned and right-aligned columns."""
    made = Table(title=title, title_justify="left", caption_justify="left")
    for heading in left:
        made.add_column(heading, no_wrap=True)
    for heading in right:
        made.add_column(heading, justify="right")
    return made


def warn_unequal(to: Console, rows: Sequence[Mapping[str, Any]]) -> int:
    """Exit status: 1, and a line for each, if workers got different bits for some setting."""
    broken = [row for row in rows if not row["replicas_equal"]]
    for row in broken:
        to.print(f"[red]{row['setting']}: workers do not hold the same bits[/red]")
    return int(bool(broken))


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Finds out before minutes of measuring whether results can be written.

    Raises:
      CommandError: a folder is not there, the plot's format is not known, or matplotlib is missing.
    """
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"{option} is {path}: no folder {path.absolute().parent}. Make it.")
    if plot_path is not None:
        if plot_path.suffix not in _PLOT_SUFFIXES:
            raise CommandError(f"--plot is {plot_path}: end its name in one of {_PLOT_SUFFIXES}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError("--plot needs matplotlib: pip install 'dynamiq-jax[cli]'")


def save_json(
    path: Path | None, device: str, config: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Writes results with environment and config, if a path is given. What is not finite becomes
    null: JSON has no infinity.
    """
    if path is not None:
        content = {"environment": environment(device), "config": config, "results": results}
        path.write_text(json.dumps(_finite(content), indent=1, default=str) + "\n")


def save_plot(path: Path | None, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draws seconds as bars, if a path is given.

    Args:
      path: where to.
      title: over the plot.
      groups: label of a group of bars to label of a bar to seconds.
    """
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")  # The plot goes to a file: no display is needed.
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(groups), squeeze=False, layout="constrained")
    figure.set_size_inches(8, sum(0.9 + 0.3 * len(bars) for bars in groups.values()))
    for axis, (label, bars) in zip(axes[:, 0], groups.items(), strict=True):
        drawn = axis.barh(list(bars), [1e3 * seconds for seconds in bars.values()], color="#1864ab")
        axis.bar_label(drawn, [format_seconds(seconds) for seconds in bars.values()], padding=3)
        axis.invert_yaxis()
        axis.set_title(label, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[-1, 0].set_xlabel(f"{title} (ms)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
