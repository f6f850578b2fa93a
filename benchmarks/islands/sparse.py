"""Loss by rounds of islands with sparse messages, beside dense and exact ones.

    python -m benchmarks.islands.sparse

Four islands take 30 local steps of AdamW in each round, on the small language model. They are rows
of one program, but what they send is made by `islands.encode` and read by `islands.decode`, with
residuals as `Islands` keeps them. `rounds_of_exact` is the number of rounds after which the run
with exact messages, of the same outer step, has the loss of the last round.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.small_lm.corpora import all_windows, load_corpora, worker_windows
from benchmarks.training.small_lm.pretraining import adamw, loss_of
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax.islands import Sparse, decode, encode
from dynamiq_jax.islands.merging import take_outer_step

PLAIN = optax.sgd(1.0)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
PUBLISHED = Sparse(keep=64, bits=2, gain=1.0)  # SparseLoCo


@dataclasses.dataclass(frozen=True)
class MessageSetting:
    """Messages and outer step of a run."""

    name: str
    method: Any
    decay: float | None = None  # of the residual; None for none
    outer: Any = PLAIN
    beside: bool = False  # whether the exchange of a round runs beside the next local steps


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
    seeds: int = 2
    points: int = 12  # of a curve
    save: bool = True  # write the result to benchmarks/results/islands_rounds.json


class Training:
    """Local steps of all islands, and the loss of a reference."""

    def __init__(self, config: Config):
        self.config, self.corpora = config, load_corpora()
        structure, params = pretrained(self.corpora, steps=120, width=128)
        self.params = jax.tree.map(np.asarray, params)
        loss_fn, self.inner = loss_of(structure), adamw(1e-3)
        held_out = all_windows(self.corpora.held_out, context=64)[:256]
        self.loss = jax.jit(lambda params: loss_fn(params, held_out))

        def one(reference: Any, opt_state: Any, tokens: Any) -> Any:
            def step(carry: Any, batch: Any) -> Any:
                params, opt_state = carry
                grads = jax.grad(loss_fn)(params, batch)
                updates, opt_state = self.inner.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), None

            return jax.lax.scan(step, (reference, opt_state), tokens)[0]

        @jax.jit
        def local(starts: Any, opt_states: Any, tokens: Any) -> Any:
            return jax.lax.map(lambda of: one(*of), (starts, opt_states, tokens))

        self.local = local

    def curve(self, setting: MessageSetting, seed: int) -> tuple[list[float], float]:
        """Return losses at some rounds, and the bits of a coordinate of a message."""
        config, reference = self.config, self.params
        size = sum(leaf.size for leaf in jax.tree.leaves(reference))
        states = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * config.islands), self.inner.init(reference)
        )
        residuals = [jax.tree.map(np.zeros_like, reference)] * config.islands
        outer, losses, bits = setting.outer.init(reference), [], 0.0
        starts, pending = [reference] * config.islands, list[Any]()
        for number in range(config.rounds):
            steps = range(number * config.every, (number + 1) * config.every)
            tokens = np.stack([self._tokens(seed, step) for step in steps], axis=1)
            together = jax.tree.map(lambda *leaves: np.stack(leaves), *starts)
            params, states = jax.device_get(self.local(together, states, tokens))
            messages, moved = [], []
            for island in range(config.islands):
                own = jax.tree.map(lambda leaf, i=island: leaf[i], params)
                moved.append(jax.tree.map(np.subtract, own, starts[island]))
                wanted = jax.tree.map(
                    lambda a, b, r: a - b + np.float32(setting.decay or 0) * r,
                    starts[island],
                    own,
                    residuals[island],
                )
                key = jax.random.key(seed * 10**6 + number * 100 + island)
                messages.append(encode(wanted, setting.method, key=key))
                sent = decode(messages[-1], like=wanted)
                residuals[island] = jax.tree.map(np.subtract, wanted, jax.device_get(sent))
            weights = [1 / config.islands] * config.islands
            pending.append(decode(*messages, weights=weights, like=reference))
            if len(pending) > setting.beside:
                mean = pending.pop(0)
                reference, outer = take_outer_step(setting.outer, mean, outer, reference)
                reference = jax.device_get(reference)
            starts = [
                jax.tree.map(np.add, reference, move) if setting.beside else reference
                for move in moved
            ]
            bits = 8 * len(messages[0].body) / size
            if (number + 1) % max(1, config.rounds // config.points) == 0:
                losses.append(float(self.loss(reference)))
        return losses, bits

    def _tokens(self, seed: int, step: int) -> Any:
        return worker_windows(
            self.corpora.reference,
            workers=self.config.islands,
            batch=2,
            context=64,
            seed=seed,
            step=step,
        )


def rounds_until(losses: list[float], rounds: int, target: float) -> float | None:
    """Return the rounds until a curve first has a loss, between its points by a line.

    Args:
      losses: at equal distances, the first one before the first round.
      rounds: of the whole curve.
      target: the loss.
    """
    each = rounds / (len(losses) - 1)
    for place, (before, after) in enumerate(itertools.pairwise(losses)):
        if after <= target <= before:
            return each * (place + (before - target) / max(before - after, 1e-9))
    return None


COLUMNS = (
    Column("setting", "setting"),
    Column("bits", "bits", "{:.2f}"),
    Column("loss", lambda row: row["mean"][-1], "{:.4f}"),
    Column("rounds of exact", "rounds_of_exact", "{:.0f}"),
)


@benchmark("islands_rounds")
def main(config: Config) -> Iterator[Report]:
    """Train with every setting."""
    training, rows = Training(config), list[dict[str, Any]]()
    start = float(training.loss(training.params))
    for setting in SETTINGS:
        curves, bits = list[list[float]](), 0.0
        for seed in range(config.seeds):
            losses, bits = training.curve(setting, seed)
            curves.append(losses)
        mean = np.mean(curves, axis=0).tolist()
        row = {"setting": setting.name, "bits": bits, "losses": curves, "mean": mean}
        exact = next((each["mean"] for each in rows if each["setting"] == "exact"), mean)
        row["rounds_of_exact"] = rounds_until([start, *exact], config.rounds, mean[-1])
        rows.append(row)
        yield Report(
            results={"before": start, "rows": rows},
            shown=[table(f"Loss after {config.rounds} rounds", COLUMNS, rows)],
        )


if __name__ == "__main__":
    run(main, __doc__)
