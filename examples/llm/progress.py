"""Progress while the example works: a bar on a terminal, a few short lines anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 50


class Show(Protocol):
    """Tells the reader how far a phase is."""

    def __call__(self, step: int, message: str) -> None:
        """Reports that `step`, counted from 0, is done."""


@contextmanager
def progress(console: Console, phase: str, steps: int) -> Iterator[Show]:
    """Follows one phase of `steps` steps.

    Args:
        console: Where to write.
        phase: Name of the phase.
        steps: Number of steps.

    Yields:
        A function to call after every step.
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
