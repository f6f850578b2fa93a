"""Final loss and bytes of local SGD (DiLoCo) on a small language model, beside an all-reduce in
every step.

    python -m benchmarks.training.local_sgd

Workers are virtual devices of this machine. All runs start from the same weights and see the same
batches in the same order; a seed changes batches and rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.every_run import batches_of, train_every
from benchmarks.training.small_lm.corpora import all_windows, load_corpora
from benchmarks.training.small_lm.pretraining import Params, evaluator, loss_of, make_optimizer
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax.training import LocalSGD

# The first is what the bytes of the others are compared with, the second what their losses are.
EVERY_STEP = "all-reduce in every step, bf16"
EXACT = "local SGD, exact"
STREAMING = {"fragments": 4, "delay": 2, "mixing": 0.5}
RUNS: dict[str, dict[str, Any]] = {
    EVERY_STEP: {},
    EXACT: {"method": "exact"},
    "local SGD, 4 bits": {"method": "dynamiq:4"},
    "local SGD, 3 bits, error feedback": {"method": "ef+dynamiq:3"},
    "4 fragments, delay 2, exact": {"method": "exact", **STREAMING},
    "4 fragments, delay 2, 4 bits": {"method": "dynamiq:4", **STREAMING},
    "outer step of 1, exact": {"method": "exact", "outer": optax.sgd(1.0)},
    "outer step of 1, 4 bits": {"method": "dynamiq:4", "outer": optax.sgd(1.0)},
}
# The run with exact means that each is compared with.
EXACT_OF = {name: f"{name.split(',')[0]}, exact" for name in RUNS} | {
    name: f"{name.rsplit(',', 1)[0]}, exact" for name in RUNS if name.startswith("4 fragments")
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    runs: tuple[str, ...] = tuple(RUNS)
    workers: int = 4
    every: int = 20  # local steps between two synchronizations
    batch: int = 2  # windows of each worker and step
    steps: int = 120
    learning_rate: float = 2e-3
    context: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)
    pretrain_steps: int = 240
    save: bool = True  # write the result to benchmarks/results/local_sgd.json
    resume: bool = True  # take runs from there that have the same other options


@dataclasses.dataclass(frozen=True)
class Training:
    """One way to train, compiled: the parameters to evaluate are those of `params_of`."""

    init: Callable[[Params], Any]
    step: Callable[[Any, jax.Array], Any]
    params_of: Callable[[Any], Params]


def every_step(structure: Any, mesh: Mesh, config: Config, seed: int) -> Training:
    """Train with a mean of gradients in every step, in bfloat16."""
    reduce = dq.all_reduce_gradients("data", method="bf16", seed=seed)
    optimizer = optax.chain(reduce, make_optimizer(config.learning_rate, config.steps))
    gradient = jax.grad(loss_of(structure))
    specs = (P(), P())

    def step(carry: Any, batches: jax.Array) -> Any:
        params, state = carry
        own = jax.lax.pcast(params, "data", to="varying")
        updates, state = optimizer.update(gradient(own, batches[0]), state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    return Training(
        lambda params: (params, optimizer.init(params)), jax.jit(mapped), lambda carry: carry[0]
    )


def local(
    structure: Any, mesh: Mesh, optimizer: optax.GradientTransformation, local_sgd: LocalSGD
) -> Training:
    """Train with local SGD."""
    gradient = jax.grad(loss_of(structure))
    specs = (P("data"), local_sgd.state_specs)

    def init(params: Params) -> Any:
        own = jax.lax.pcast((params, optimizer.init(params)), "data", to="varying")
        return jax.tree.map(lambda leaf: leaf[None], own), local_sgd.init(params)

    def step(carry: Any, batches: jax.Array) -> Any:
        stacked, state = carry
        params, opt_state = jax.tree.map(lambda leaf: leaf[0], stacked)
        updates, opt_state = optimizer.update(gradient(params, batches[0]), opt_state, params)
        params, state = local_sgd.update(optax.apply_updates(params, updates), state)
        return jax.tree.map(lambda leaf: leaf[None], (params, opt_state)), state

    return Training(
        jax.jit(jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs)),
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)),
        lambda carry: carry[1].reference,
    )


def make_local_sgd(name: str, config: Config, seed: int) -> LocalSGD:
    """Make the local SGD of a run."""
    return LocalSGD(axis_name="data", every=config.every, seed=seed, **RUNS[name])


def bytes_by_step(name: str, config: Config, shapes: Any) -> list[int]:
    """Return the bytes that a worker sends in each step of a period."""
    if name == EVERY_STEP:
        return [dq.wire_report(shapes, config.workers, method="bf16").bytes_per_worker]
    local_sgd = make_local_sgd(name, config, seed=0)
    reports = local_sgd.wire_report(shapes, config.workers)
    sent = [local_sgd.due(number).sent for number in range(config.every)]
    return [0 if each is None else reports[each].bytes_per_worker for each in sent]


COLUMNS = (
    Column("run", "run"),
    Column("loss", lambda row: np.mean([losses[-1] for losses in row["losses"]]), "{:.4f}"),
    Column(
        "off exact means",
        lambda row: np.mean(row["off_exact"]) if "off_exact" in row else None,
        "{:+.2%}",
    ),
    Column("bytes a step", "bytes_a_step", "{:,.0f}"),
    Column("fewer than BF16", lambda row: row.get("times_fewer_bytes"), "{:.0f}x"),
    Column("peak bytes of a step", "peak_bytes", "{:,}"),
)


@benchmark("local_sgd")
def main(config: Config) -> Iterator[Report]:
    """Train with all runs and seeds; report after each run, since all of them take long."""
    jax.config.update("jax_num_cpu_devices", config.workers)
    corpora = load_corpora()
    with Console().status("Pre-training"):
        structure, params = pretrained(corpora, steps=config.pretrain_steps)
    mesh = jax.make_mesh((config.workers,), ("data",), axis_types=(AxisType.Auto,))
    shapes = jax.eval_shape(lambda: params)
    evaluate = evaluator(structure, all_windows(corpora.held_out, context=config.context))

    def losses_of(name: str, seed: int) -> list[float]:
        """Train; return the evaluation loss before the first and after every period."""
        if name == EVERY_STEP:
            training = every_step(structure, mesh, config, seed)
        else:
            optimizer = make_optimizer(config.learning_rate, config.steps)
            training = local(structure, mesh, optimizer, make_local_sgd(name, config, seed))
        carry, losses = training.init(params), [evaluate(params)]
        for number, tokens in enumerate(batches_of(corpora.reference, config, seed), 1):
            carry = training.step(carry, tokens)
            if number % config.every == 0:
                losses.append(evaluate(training.params_of(carry)))
        return losses

    results: list[dict[str, Any]] = []
    earlier = files.earlier_results(
        files.path_of("local_sgd"), dataclasses.asdict(config), but=("runs", "save", "resume")
    )
    known = {row["run"]: row["losses"] for row in earlier or () if config.resume}
    make = lambda name: functools.partial(losses_of, name)  # noqa: E731
    for name, curves in train_every(config.runs, config.seeds, make, known):
        sent = bytes_by_step(name, config, shapes)
        mean = float(np.mean(sent))
        row = {"run": name, "losses": curves, "bytes_a_step": mean, "peak_bytes": max(sent)}
        results.append(row)
        _compare(results)
        yield Report(results=results, draw=lambda: plot(results, config))
    title = "Evaluation loss after training, and bytes that a worker sends"
    yield Report(shown=[table(title, COLUMNS, results)])


def _compare(results: list[dict[str, Any]]) -> None:
    """Add what a run is, relative to others, where these are there."""
    by_name = {row["run"]: row for row in results}
    row = results[-1]
    final = np.array(row["losses"])[:, -1]
    if EVERY_STEP in by_name:
        row["times_fewer_bytes"] = by_name[EVERY_STEP]["bytes_a_step"] / row["bytes_a_step"]
        row["off_every_step"] = (
            final / np.array(by_name[EVERY_STEP]["losses"])[:, -1] - 1
        ).tolist()
    exact = EXACT_OF[row["run"]]
    if exact in by_name and row["run"] != EVERY_STEP:
        row["off_exact"] = (final / np.array(by_name[exact]["losses"])[:, -1] - 1).tolist()


def plot(results: list[dict[str, Any]], config: Config) -> Figure:
    """Draw the evaluation loss against the bytes that a worker has sent."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axis = figure.subplots()
    colors = {"local SGD": "C0", "4 fragments": "C1", "outer step of 1": "C2"}
    for row in results:
        losses = np.mean(row["losses"], axis=0)[1:]
        periods = np.arange(1, len(losses) + 1)
        megabytes = row["bytes_a_step"] * config.every * periods / 1e6
        kind, _, way = row["run"].partition(",")
        style = {"color": colors.get(kind, "black"), "ls": ":" if "exact" in way else "-"}
        if "feedback" in way:
            style = {"color": "C3", "ls": "-"}
        axis.plot(megabytes, losses, marker=".", label=row["run"], **style)
    axis.set(
        xscale="log",
        xlabel="sent by each worker since the start (MB)",
        ylabel="evaluation loss (nats a token)",
        title=f"{config.workers} workers, the same {config.steps} steps in every run",
    )
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    return figure


if __name__ == "__main__":
    run(main, __doc__)
