"""Training of every run of a benchmark with every seed: batches, and results that are known."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.training.small_lm.corpora import worker_windows

Run = TypeVar("Run")
Result = TypeVar("Result")


class BatchOptions(Protocol):
    """Options of a benchmark that say what its workers read."""

    workers: int
    batch: int  # windows of each worker and step
    context: int
    steps: int


def batches_of(corpus: np.ndarray, config: BatchOptions, seed: int) -> Iterator[jax.Array]:
    """Yield the batches of all steps, int32 [workers, batch, context + 1]."""
    for step in range(config.steps):
        yield jnp.asarray(
            worker_windows(
                corpus,
                workers=config.workers,
                batch=config.batch,
                context=config.context,
                seed=seed,
                step=step,
            )
        )


def train_every(
    runs: Sequence[Run],
    seeds: Sequence[int],
    make: Callable[[Run], Callable[[int], Result]],
    known: Mapping[Run, Sequence[Result]],
    *,
    first_again: bool = False,
) -> Iterator[tuple[Run, list[Result]]]:
    """Train every run with every seed, behind a progress bar, and yield the results of its seeds.

    Args:
      runs: the runs, in order.
      seeds: seeds of each.
      make: returns the function that trains a run with a seed.
      known: results of the first seeds of some runs, which are not trained again.
      first_again: whether the first run is trained in any case. If its results differ, as on
        another machine or with other versions, nothing counts as known.
    """
    with Progress(console=Console(), transient=True) as progress:
        task = progress.add_task("Training", total=len(runs) * len(seeds))
        for number, run in enumerate(runs):
            again = first_again and number == 0
            results = [] if again else list(known.get(run, ()))
            if len(results) < len(seeds):
                train = make(run)
            for seed in seeds[len(results) :]:
                results.append(train(seed))
                progress.update(task, completed=number * len(seeds) + len(results))
            if again and results != known.get(run):
                known = {}
            yield run, results
