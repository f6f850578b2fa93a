"""Fine-tune a real language model on islands: the held-out loss by rounds and messages.

    python -m benchmarks.real_lm.islands --model results/smollm2

Islands train from the same weights, on rows of their own, with AdamW. The rate of the outer step is
1. A run takes about ten minutes on two cores, and runs that the result file has are not run again.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import track

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.islands.outer_steps import IslandTraining, losses_of, references
from benchmarks.islands.sparse import SETTINGS
from benchmarks.real_lm.folder import check_folder
from benchmarks.real_lm.texts import Text, file_of
from examples import finetune_llm
from examples.llm.data import Rows, rows_of_step
from examples.llm.loss import evaluator, mean_loss
from examples.llm.recipe import Recipe
from examples.llm.train_step import State, make_train_step

NAME = "islands_real_lm"
MESSAGES = ("exact", "0.25 bits", "4 bits", "published, 0.16 bits", "0.5 bits")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: Path = Path("results/smollm2")
    """Folder of the model."""

    text: Text = "chats"
    """Kind of text."""

    count: int = 640
    """Documents, of which a tenth is held out."""

    islands: int = 2
    """Islands."""

    rounds: int = 15
    """Outer steps."""

    every: int = 10
    """Local steps of a round."""

    points: int = 5
    """Evaluations."""

    context: int = 128
    """Tokens of a row; an island takes one in each local step."""

    learning_rate: float = 5e-5
    """Peak of the rate of local steps."""

    seed: int = 0
    """Chooses the rows and the rounding."""


def islands_of(config: Config) -> tuple[IslandTraining, Any]:
    """Return the islands, and the function of parameters to the held-out loss."""
    data = file_of(config.model.parent, config.text, config.count)
    options = finetune_llm.Options(
        checkpoint=config.model, data=data, workers=1, batch=1, context=config.context
    )
    _, task = finetune_llm.read_task(options, finetune_llm.make_mesh(options))
    steps = config.rounds * config.every
    optimizer = Recipe(steps=steps, learning_rate=config.learning_rate).optimizer()

    def loss_fn(params: Any, rows: Rows) -> jax.Array:
        return mean_loss(task.structure, params, rows)

    train_step = jax.jit(make_train_step(loss_fn, optimizer), donate_argnums=0)

    def local(params: Any, state: Any, seed: int, number: int, island: int) -> tuple[Any, Any]:
        trained = State(jax.device_put(params), state)
        for step in range(number * config.every, (number + 1) * config.every):
            chosen = rows_of_step(len(task.rows.tokens), count=config.islands, seed=seed, step=step)
            rows = Rows(*(field[chosen[island : island + 1]] for field in task.rows))
            trained, _ = train_step(trained, rows)
        return trained.params, trained.optimizer

    params = jax.tree.map(np.asarray, task.load())
    loss = evaluator(task.structure, task.held_out, 8, task.mesh)
    init = jax.jit(optimizer.init)
    training = IslandTraining(config.islands, params, init, local)
    return training, lambda params: loss(jax.device_put(params))


COLUMNS = (
    Column("messages", "setting"),
    Column("bits", "bits", "{:.2f}"),
    Column("held-out loss", lambda row: row["losses"][-1], "{:.4f}"),
)


@benchmark(NAME)
def main(config: Config) -> Iterator[Report]:
    """Train with every setting that the result file lacks."""
    check_folder(config.model)
    options = {**files.options_of(config), "model": config.model.name}
    earlier = files.earlier_results(files.path_of(NAME), options, but=())
    islands, loss_of = islands_of(config)
    found = earlier or {"before": loss_of(islands.params), "rows": []}
    done = {row["setting"] for row in found["rows"]}
    yield Report(results=found, options=options)
    for setting in SETTINGS:
        if setting.name not in MESSAGES or setting.name in done:
            continue
        rounds = itertools.islice(references(islands, setting, config.seed), config.rounds)
        shown = track(rounds, setting.name, config.rounds)
        losses, bits = losses_of(shown, loss_of, every=max(1, config.rounds // config.points))
        found["rows"].append({"setting": setting.name, "bits": bits, "losses": losses})
        yield Report(results=found, shown=[table("Loss", COLUMNS, found["rows"])], options=options)


if __name__ == "__main__":
    run(main, __doc__)
