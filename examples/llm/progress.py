"""Progress of a phase: a bar on a terminal, a few short lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 50  # steps


class Show(Protocol):
    """A function that shows how far a phase is."""

    def __call__(self, step: int, message: str) -> None:
        """Show that `step`, counted from 0, is done."""


@contextmanager
def progress(console: Console, phase: str, steps: int) -> Iterator[Show]:
    """Show the progress of a phase.

    Args:
      console: where to write.
      phase: name of the phase.
      steps: number of its steps.

    Yields:
      A function to call after each step.
    """
    if not console.is_terminal:

        def line(step: int, message: str) -> None:
            if (step + 1) % LINE_EVERY == 0 or step + 1 == steps:
                console.print(
                    f"{phase} {step + 1}/{steps}  {message}", soft_wrap=True, highlight=False
                )

        yield line
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[message]}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(phase, total=steps, message="compiling")
        yield lambda step, message: bars.update(task, completed=step + 1, message=message)
