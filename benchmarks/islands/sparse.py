"""Loss by rounds of islands with sparse messages, beside dense and exact ones.

    python -m benchmarks.islands.sparse

Four islands take 30 local steps of AdamW in each round, on the small language model.
The loss is of held-out text: it rises again when a run has learned its text by heart.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.islands.outer_steps import IslandTraining, MessageSetting, losses_of, references
from benchmarks.training.small_lm.corpora import all_windows, load_corpora, worker_windows
from benchmarks.training.small_lm.pretraining import adamw, loss_of
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax.islands import Sparse

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
PUBLISHED = Sparse(keep=64, bits=2, gain=1.0)  # SparseLoCo


SETTINGS = (
    MessageSetting("exact", "exact"),
    MessageSetting("0.25 bits", Sparse(), 1.0),
    MessageSetting("published, 0.16 bits", PUBLISHED, 0.95),
    MessageSetting("0.11 bits", Sparse(keep=46), 1.0),
    MessageSetting("4 bits", "dynamiq:4", 1.0),
    MessageSetting("0.5 bits", Sparse(keep=272), 1.0),
    MessageSetting("0.25 bits, gain 1", Sparse(gain=1.0), 1.0),
    MessageSetting("0.25 bits, gain 1.6", Sparse(gain=1.6), 1.0),
    MessageSetting("0.25 bits, decay 0.95", Sparse(), 0.95),
    MessageSetting("0.25 bits, no residual", Sparse(), None),
    MessageSetting("exact, Nesterov", "exact", outer=NESTEROV),
    MessageSetting("0.25 bits, Nesterov", Sparse(), 1.0, NESTEROV),
    MessageSetting("3 bits", "dynamiq:3", 1.0),
    MessageSetting("exact, beside local steps", "exact", beside=True),
    MessageSetting("0.25 bits, beside local steps", Sparse(), 1.0, beside=True),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    islands: int = 4
    rounds: int = 120
    every: int = 30  # local steps
    seeds: int = 3
    points: int = 12  # of a curve
    save: bool = True  # write the result to benchmarks/results/islands_rounds.json


class Training:
    """Islands of the small language model, and the loss of a reference."""

    def __init__(self, config: Config):
        self.config, corpora = config, load_corpora()
        structure, params = pretrained(corpora, steps=120, width=128)
        loss_fn, inner = loss_of(structure), adamw(1e-3)
        held_out = all_windows(corpora.held_out, context=64)[:256]
        self.loss = jax.jit(lambda params: loss_fn(params, held_out))

        @jax.jit
        def steps(reference: Any, opt_state: Any, tokens: Any) -> Any:
            def step(carry: Any, batch: Any) -> Any:
                params, opt_state = carry
                grads = jax.grad(loss_fn)(params, batch)
                updates, opt_state = inner.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), None

            return jax.lax.scan(step, (reference, opt_state), tokens)[0]

        def local(params: Any, state: Any, seed: int, number: int, island: int) -> Any:
            first = number * config.every
            tokens = [
                worker_windows(
                    corpora.reference,
                    workers=config.islands,
                    batch=2,
                    context=64,
                    seed=seed,
                    step=step,
                )[island]
                for step in range(first, first + config.every)
            ]
            return steps(params, state, np.stack(tokens))

        params = jax.tree.map(np.asarray, params)
        self.islands = IslandTraining(config.islands, params, inner.init, local)

    def curve(self, setting: MessageSetting, seed: int) -> tuple[list[float], float]:
        """Return losses at some rounds, and the bits of a coordinate of a message."""
        config = self.config
        rounds = itertools.islice(references(self.islands, setting, seed), config.rounds)
        return losses_of(rounds, self.loss, every=max(1, config.rounds // config.points))


COLUMNS = (
    Column("setting", "setting"),
    Column("bits", "bits", "{:.2f}"),
    Column("lowest loss", lambda row: min(row["mean"]), "{:.4f}"),
    Column("loss at the end", lambda row: row["mean"][-1], "{:.4f}"),
)


@benchmark("islands_rounds")
def main(config: Config) -> Iterator[Report]:
    """Train with every setting."""
    training, rows = Training(config), list[dict[str, Any]]()
    start = float(training.loss(training.islands.params))
    for setting in SETTINGS:
        curves, bits = list[list[float]](), 0.0
        for seed in range(config.seeds):
            losses, bits = training.curve(setting, seed)
            curves.append(losses)
        mean = np.mean(curves, axis=0).tolist()
        row = {"setting": setting.name, "bits": bits, "losses": curves, "mean": mean}
        rows.append(row)
        yield Report(
            results={"before": start, "rows": rows},
            shown=[table(f"Loss after {config.rounds} rounds", COLUMNS, rows)],
        )


if __name__ == "__main__":
    run(main, __doc__)
