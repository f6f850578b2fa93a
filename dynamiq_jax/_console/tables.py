"""Progress and tables on a terminal."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


def console(*, quiet: bool = False) -> Console:
    """Return the console of a command: wide enough for its tables where there is no terminal."""
    terminal = Console(quiet=quiet)
    return terminal if terminal.is_terminal else Console(quiet=quiet, width=160)


@contextlib.contextmanager
def progress(to: Console, phase: str, steps: int) -> Iterator[Callable[[str], None]]:
    """Show a bar until the phase is over; nothing where the output is no terminal.

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
    """Make an empty table with left-aligned and right-aligned columns."""
    made = Table(title=title, title_justify="left", caption_justify="left")
    for heading in left:
        made.add_column(heading, no_wrap=True)
    for heading in right:
        made.add_column(heading, justify="right")
    return made


def warn_unequal(to: Console, rows: Sequence[Mapping[str, Any]]) -> int:
    """Print a line for each setting for which workers got different bits.

    Returns:
      The exit status: 1 if there is one.
    """
    broken = [row for row in rows if not row["replicas_equal"]]
    for row in broken:
        to.print(f"[red]{row['setting']}: workers do not hold the same bits[/red]")
    return int(bool(broken))
