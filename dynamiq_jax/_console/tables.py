"""Progress and tables on a terminal."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pallas_kernels._jax.compat import override


class _Console(Console):
    @override
    def on_broken_pipe(self) -> None:
        """Leave a reader that is gone to `program.ending_with_reader`."""
        # Rich calls this where it has caught the error.
        raise


class FittedTable(Table):
    """A table whose cells are never cut: lines of `heading: cell` where it does not fit."""

    @override
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, or its rows one below the other."""
        cells = [[Text.from_markup(str(cell)) for cell in each.cells] for each in self.columns]
        for column, texts in zip(self.columns, cells, strict=True):
            words = map(cell_len, str(column.header).split())
            column.min_width = max((*words, *(text.cell_len for text in texts)), default=0)
        needed = sum((column.min_width or 0) + 3 for column in self.columns) + 1
        if needed <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield Text(str(self.title or ""), style="italic")
        for first, *others in zip(*cells, strict=True):
            yield Text.assemble(first, style="bold")
            for column, text in zip(self.columns[1:], others, strict=True):
                if text:
                    yield Text.assemble(f"  {column.header}: ", text)
        yield Text(str(self.caption or ""), style="dim italic")


def console(*, quiet: bool = False) -> Console:
    """Return the console of a command: wide enough for its tables where there is no terminal."""
    terminal = _Console(quiet=quiet, highlight=False)
    return terminal if terminal.is_terminal else _Console(quiet=quiet, highlight=False, width=160)


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
    made = FittedTable(title=title, title_justify="left", caption_justify="left")
    for heading in left:
        made.add_column(heading, no_wrap=True)
    for heading in right:
        made.add_column(heading, justify="right")
    return made


def warn_unequal(to: Console, rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the settings for which workers got different bits, and return the exit status."""
    broken = [row for row in rows if not row["replicas_equal"]]
    for row in broken:
        to.print(f"[red]{row['setting']}: workers do not hold the same bits[/red]")
    return int(bool(broken))
