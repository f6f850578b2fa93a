"""Progress of a run on the console: a bar on a terminal, a line now and then elsewhere."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.llm.model import Params
from examples.llm.recipe import Recipe
from examples.llm.run import Record, Task, train

SECONDS_BETWEEN_LINES = 20


def train_shown(
    console: Console, task: Task, recipe: Recipe, folder: Path, save_every: int, name: str = ""
) -> tuple[Params, list[Record]]:
    """Train, with progress on the console under a name; see `train`."""
    name = name or recipe.name
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    printed = 0.0

    def say(text: str) -> None:
        console.print(f"{name}: {text}", soft_wrap=True, highlight=False)

    say("compiling")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task(name, total=recipe.steps)

        def show(record: Record) -> None:
            nonlocal printed
            step, text = record["step"], f"loss {record['loss']:.3f}"
            if "error" in record:
                text += f", estimated vNMSE {record['error']:.1e}"
            bars.update(bar, completed=step, description=f"{name}: {text}")
            now = time.monotonic()
            if not console.is_terminal and now - printed > SECONDS_BETWEEN_LINES:
                printed = now
                say(f"step {step} of {recipe.steps}, {text}")

        return train(task, recipe, folder, save_every=save_every, on_start=say, on_step=show)
