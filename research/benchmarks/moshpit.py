"""Moshpit averages with dead peers: variance between peers beside the law and other schemes, errors
of lossy methods, and the loss of a small language model.

    python -m research.benchmarks.moshpit

The variances are simulations in NumPy. Peers that train are virtual devices of this machine. Dead
ones miss the averages of a step and go on alone.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.every_run import batches_of, train_every
from benchmarks.training.small_lm.corpora import Corpora, all_windows, load_corpora
from benchmarks.training.small_lm.pretraining import Params, evaluator, loss_of, make_optimizer
from benchmarks.training.small_lm.training import pretrained
from dynamiq_research import moshpit_mean, moshpit_variance
from research.benchmarks.averaging_schemes import MOSHPIT, SCHEMES, rounds_until, variances

AXES = ("x", "y", "z")
VALUES = ("gradients", "parameters", "changes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train."""

    averages: str  # one of VALUES: gradients in each step, or the others after some local steps
    dead: bool = True  # whether peers are dead at times
    method: str = "exact"
    whole: bool = False  # whether one dead peer stops the step, or the average, of all

    def __post_init__(self):
        if self.averages not in VALUES:
            raise ValueError(f"averages={self.averages!r} is not possible. Give one of {VALUES}.")


# The first of each group is what losses of the others are compared with.
GROUPS: dict[str, dict[str, Run]] = {
    "gradients, each step": {
        "no failures": Run(averages="gradients", dead=False),
        "Moshpit": Run(averages="gradients"),
        "Moshpit, 5 bits": Run(averages="gradients", method="dynamiq:5"),
        "no step if one is dead": Run(averages="gradients", whole=True),
    },
    "parameters, every 5 steps": {
        "no failures": Run(averages="parameters", dead=False),
        "Moshpit": Run(averages="parameters"),
        "Moshpit, changes at 5 bits": Run(averages="changes", method="dynamiq:5"),
        "no average if one is dead": Run(averages="parameters", whole=True),
    },
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    grids: tuple[tuple[tuple[int, ...], float], ...] = (  # peers along each axis, share of dead
        ((8, 8, 8), 0.0),
        ((8, 8, 8), 0.01),
        ((8, 8, 8), 0.05),
        ((32, 32), 0.01),
        ((4, 2), 0.05),
        ((4, 2), 0.3),
    )
    peers: int = 4_000_000  # simulated for each law, in all trials together
    trials: int = 40_000  # at most, of each law
    schemes_grid: tuple[int, ...] = (8, 8, 8)
    schemes_dead: float = 0.01  # share of dead peers in a round
    schemes_rounds: int = 40
    schemes_trials: int = 300
    groups: tuple[str, ...] = tuple(GROUPS)
    dead: float = 0.05  # share of dead peers in a step of training
    grid: tuple[int, ...] = (4, 2)  # of peers that train
    width: int = 128  # features of a token in the model
    batch: int = 1  # windows of each peer and step
    steps: int = 80
    every: int = 5  # steps between averages of parameters or changes
    repair: int = 20  # steps between exact averages of parameters, where other values are averaged
    learning_rate: float = 2e-3
    context: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)
    pretrain_steps: int = 240
    save: bool = True  # write the result to research/benchmarks/results/moshpit.json
    resume: bool = True  # take trained groups from there that have the same other options

    @property
    def workers(self) -> int:
        """Number of peers that train."""
        return math.prod(self.grid)


def laws(config: Config) -> list[dict[str, Any]]:
    """Simulate rounds on several grids, beside the law."""
    rows = []
    for grid, dead in config.grids:
        rounds = 2 * len(grid)
        trials = min(config.trials, config.peers // int(np.prod(grid)))
        simulated = variances(MOSHPIT, grid, dead, rounds=rounds, trials=trials)
        law = [moshpit_variance(number, grid=grid, dead=dead) for number in range(rounds + 1)]
        rows.append({"grid": grid, "dead": dead, "simulated": simulated.tolist(), "law": law})
    return rows


def schemes(config: Config) -> list[dict[str, Any]]:
    """Simulate all schemes with as many peers."""
    rows = []
    for name in SCHEMES:
        simulated = variances(
            name,
            config.schemes_grid,
            config.schemes_dead,
            rounds=config.schemes_rounds,
            trials=config.schemes_trials,
        )
        until = {f"{limit:g}": rounds_until(simulated, limit) for limit in (1e-2, 1e-4, 1e-9)}
        rows.append({"scheme": name, "variance": simulated.tolist(), "rounds_until": until})
    return rows


@dataclasses.dataclass(frozen=True)
class Peers:
    """Programs of all peers on a grid of devices, whose state has a leading axis of peers.

    A state is (parameters, those at the last average, state of the optimizer).
    """

    mesh: Mesh
    gradient: Callable[[Params, jax.Array], Params]
    optimizer: optax.GradientTransformation

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the grid."""
        return self.mesh.axis_names

    def init(self, params: Params) -> Any:
        """Give all peers the same parameters."""
        state = (params, params, self.optimizer.init(params))
        stack = lambda state: jax.tree.map(lambda leaf: jnp.stack([leaf] * self.mesh.size), state)  # noqa: E731
        return jax.jit(stack, out_shardings=jax.NamedSharding(self.mesh, P(self.axes)))(state)

    def step(self, method: str | None) -> Any:
        """Compile a step, which averages gradients if there is a method for them."""

        def step(state: Any, batches: jax.Array, alive: jax.Array, key: jax.Array) -> Any:
            params, before, opt_state = jax.tree.map(lambda leaf: leaf[0], state)
            grads = self.gradient(params, batches[0])
            if method is not None:
                grads = moshpit_mean(grads, self.axes, key=key, alive=alive[0], method=method)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            state = (optax.apply_updates(params, updates), before, opt_state)
            return jax.tree.map(lambda leaf: leaf[None], state)

        return self._compiled(step, 3)

    def average(self, values: str, method: str) -> Any:
        """Compile an average of parameters, or of their changes since the last average."""

        def average(state: Any, alive: jax.Array, key: jax.Array) -> Any:
            params, before, opt_state = jax.tree.map(lambda leaf: leaf[0], state)
            here = {"key": key, "alive": alive[0], "method": method}
            if values == "changes":
                change = jax.tree.map(jnp.subtract, params, before)
                params = jax.tree.map(jnp.add, before, moshpit_mean(change, self.axes, **here))
            else:
                params = moshpit_mean(params, self.axes, **here)
            return jax.tree.map(lambda leaf: leaf[None], (params, params, opt_state))

        return self._compiled(average, 2)

    def _compiled(self, function: Callable[..., Any], num_arguments: int) -> Any:
        own = P(self.axes)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=(*[own] * num_arguments, P()), out_specs=own
        )
        return jax.jit(mapped, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class MoshpitBench:
    """Everything that runs share."""

    config: Config
    structure: Any
    params: Params  # at the start
    corpora: Corpora
    evaluate: Callable[[Params], float]

    def peers(self, steps: int) -> Peers:
        """Return peers whose learning rate decays over some steps."""
        config = self.config
        mesh = jax.make_mesh(
            config.grid, AXES[: len(config.grid)], axis_types=(AxisType.Auto,) * len(config.grid)
        )
        optimizer = make_optimizer(config.learning_rate, steps)
        return Peers(mesh, jax.grad(loss_of(self.structure)), optimizer)

    def losses(self, run: Run, seed: int) -> list[float]:
        """Train; return evaluation losses of the mean of all peers' parameters."""
        config = self.config
        rng = np.random.default_rng(seed)  # the same peers are dead in all runs
        alive = rng.random((config.steps, config.workers)) >= config.dead
        alive |= not run.dead
        lost = run.whole & ~alive.all(1)
        in_step = run.averages == "gradients"
        peers = self.peers(config.steps - int(lost.sum()) * in_step)
        step = peers.step(run.method if in_step else None)
        average = peers.average(run.averages, run.method)
        repair = peers.average("parameters", "exact")
        state = peers.init(self.params)
        losses = [self.evaluate(self.params)]
        steps = zip(alive, batches_of(self.corpora.reference, config, seed), strict=True)
        for number, (here, tokens) in enumerate(steps):
            key = jax.random.fold_in(jax.random.key(seed), number)
            if not (lost[number] and in_step):
                state = step(state, tokens, here, key)
            if (number + 1) % config.repair == 0 and run.averages != "parameters":
                if not lost[number]:
                    state = repair(state, here, key)
            elif (number + 1) % config.every == 0 and not in_step and not lost[number]:
                state = average(state, here, key)
            if (number + 1) % config.repair == 0:
                losses.append(self.evaluate(_mean(state[0])))
        return losses

    def errors(self) -> list[dict[str, Any]]:
        """Measure errors of lossy averages of what peers have after local steps from one start.

        They are relative to the root mean square of the mean change.
        """
        config = self.config
        peers = self.peers(config.steps)
        step, state = peers.step(None), peers.init(self.params)
        here = np.ones(peers.mesh.size, bool)
        batches = batches_of(self.corpora.reference, config, seed=0)
        for number, tokens in enumerate(itertools.islice(batches, config.every)):
            state = step(state, tokens, here, jax.random.key(number))
        state = jax.device_get(state)
        exact, before = _flat(_mean(state[0])), _flat(_mean(state[1]))
        rows = []
        for method in ("bf16", "dynamiq:8", "dynamiq:5"):
            row: dict[str, Any] = {"method": method}
            for values in ("parameters", "changes"):
                averaged = peers.average(values, method)(state, here, jax.random.key(0))
                error = _flat(_mean(averaged[0])) - exact
                row[values] = float(np.linalg.norm(error) / np.linalg.norm(exact - before))
            rows.append(row)
        return rows


def _mean(stacked: Params) -> Params:
    """Average over peers, in float64 and as float32."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64).mean(0).astype(np.float32), stacked
    )


def _flat(params: Params) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def mean_final_loss(row: dict[str, Any]) -> float:
    """Return the mean over the seeds of the loss after the last step."""
    return float(np.mean([losses[-1] for losses in row["losses"]]))


COLUMNS = (
    Column("average of", "group"),
    Column("run", "run"),
    Column("loss", mean_final_loss, "{:.4f}"),
    Column("off", lambda row: np.mean(row["off"]), "{:+.2%}"),
)


def prepare(config: Config) -> MoshpitBench:
    """Pre-train the model that all runs start from."""
    corpora = load_corpora()
    structure, params = pretrained(corpora, steps=config.pretrain_steps, width=config.width)
    evaluate = evaluator(structure, all_windows(corpora.held_out, context=config.context))
    return MoshpitBench(config, structure, jax.device_get(params), corpora, evaluate)


@benchmark("research/moshpit")
def main(config: Config) -> Iterator[Report]:
    """Simulate and train; report after each run, since all of them take long."""
    jax.config.update("jax_num_cpu_devices", config.workers)
    console = Console()
    options = dataclasses.asdict(config)
    earlier = {}
    if config.resume:
        simulated = ("grids", "peers", "trials")
        simulated += ("schemes_grid", "schemes_dead", "schemes_rounds", "schemes_trials")
        but = (*simulated, "groups", "save", "resume")
        earlier = files.earlier_results(files.path_of("research/moshpit"), options, but=but) or {}
    results: dict[str, Any] = {"laws": laws(config), "schemes": schemes(config)}
    bench = functools.cache(lambda: prepare(config))
    with console.status("Pre-training"):
        results["errors"] = earlier.get("errors") or bench().errors()
    results["training"] = []
    known = {(row["group"], row["run"]): row["losses"] for row in earlier.get("training", ())}
    runs = [(group, name) for group in config.groups for name in GROUPS[group]]

    def make(run: tuple[str, str]) -> Callable[[int], list[float]]:
        group, name = run
        return functools.partial(bench().losses, GROUPS[group][name])

    for (group, name), curves in train_every(runs, config.seeds, make, known):
        row = {"group": group, "run": name, "losses": curves}
        results["training"].append(row)
        first = next(row for row in results["training"] if row["group"] == group)
        pairs = zip(curves, first["losses"], strict=True)
        row["off"] = [losses[-1] / other[-1] - 1 for losses, other in pairs]
        yield Report(
            results=results,
            shown=[table("Evaluation loss after training", COLUMNS, results["training"])],
            draw=lambda: plot(results, config),
        )


def plot(results: dict[str, Any], config: Config) -> Figure:
    """Draw variances against rounds, beside the law, and losses against steps."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = 14
    for row in results["schemes"]:
        left.semilogy(row["variance"][: shown + 1], marker=".", label=row["scheme"])
    law = [
        moshpit_variance(number, grid=config.schemes_grid, dead=config.schemes_dead)
        for number in range(shown + 1)
    ]
    left.semilogy(law, "k--", lw=1, label="law of Moshpit")
    left.set(
        title=f"{np.prod(config.schemes_grid)} peers, {config.schemes_dead:.0%} dead a round"
        " (simulated)",
        xlabel="rounds",
        ylabel="variance between peers, relative",
        ylim=(1e-10, 3),
    )
    left.grid(alpha=0.3)
    left.legend(fontsize="small", loc="center right")
    group = config.groups[0]
    rows = [row for row in results["training"] if row["group"] == group]
    for style, row in zip(("k-", "C0--", "C1:", "C3-"), rows, strict=False):
        losses = np.mean(row["losses"], axis=0)
        right.plot(np.arange(len(losses)) * config.repair, losses, style, label=row["run"])
    right.set(
        title=f"{np.prod(config.grid)} peers, {config.dead:.0%} dead a step: {group}",
        xlabel="steps",
        ylabel="evaluation loss (nats a token)",
    )
    right.grid(alpha=0.3)
    if rows:
        right.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    run(main, __doc__)
