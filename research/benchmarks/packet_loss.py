"""Final loss of fine-tuning a small language model over a channel that loses packets, drift of the
workers over the run, and the error of one reduction with every kind of message.

    python -m research.benchmarks.packet_loss

It simulates: workers are virtual devices of this machine, and lost packets are ignored. All runs
start from the same weights and see the same batches in the same order; a seed changes batches,
rounding and losses.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.every_run import batches_of, train_every
from benchmarks.training.small_lm.corpora import Corpora, all_windows, load_corpora
from benchmarks.training.small_lm.pretraining import Params, evaluator, loss_of, make_optimizer
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import Axis, Call, resolve_method
from dynamiq_jax.topologies import AllToAll
from dynamiq_research import LossyChannel, LossyCollectives, drift
from dynamiq_research.packet_loss import terms_of

Broadcast = Literal["parameters", "updates"]


@dataclasses.dataclass(frozen=True)
class Run:
    """Kind of run, for all seeds."""

    method: str
    rate: float
    burst: float | None = None
    rows_together: bool = False
    broadcast: Broadcast = "parameters"
    decays: bool = True  # the learning rate, to zero; else it stays where the warm-up ends

    @property
    def gradients(self) -> str:
        """How gradients are sent."""
        return f"{self.method}, rows together" if self.rows_together else self.method


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    methods: tuple[str, ...] = ("bf16", "dynamiq:5")
    rates: tuple[float, ...] = (0.0, 0.01, 0.1, 0.2)  # the first is compared with
    burst: float = 8.0  # packets, of the runs with bursts, at `contrast_rate`
    contrast_rate: float = 0.1  # of the runs with bursts, and of those for the drift over time
    workers: int = 8
    batch: int = 1  # windows of each worker and step
    steps: int = 80
    learning_rate: float = 2e-3
    context: int = 128
    width: int = 128  # features of a token in the model
    seeds: tuple[int, ...] = (0, 1, 2)
    pretrain_steps: int = 240
    message_methods: tuple[str, ...] = (  # of which one reduction is measured, at `contrast_rate`
        "exact",
        "bf16",
        "blockint:5",
        "mxfp4",
        "thc",
        "marsit",
        "dynamiq:3",
        "dynamiq:5",
        "flash_communication:5",
        "entropy_coded:agreement=0.1",
    )
    message_size: int = 2**20  # coordinates of that reduction
    save: bool = True  # write research/benchmarks/results/packet_loss.json, and a plot
    resume: bool = True  # take runs from there, if the other options are the same

    @property
    def runs(self) -> list[Run]:
        """All runs, those without loss first.

        The last two show the drift over time. With a learning rate that decays, all steps would get
        smaller, and the drift with them.
        """
        plain = [Run(method, rate) for rate in self.rates for method in self.methods]
        together = [Run(self.methods[-1], rate, None, True) for rate in self.rates if rate]
        bursts = [Run(method, self.contrast_rate, self.burst) for method in self.methods]
        bursts.append(dataclasses.replace(bursts[-1], rows_together=True))
        of_parameters = Run(self.methods[0], self.contrast_rate, decays=False)
        of_updates = dataclasses.replace(of_parameters, broadcast="updates")
        return [*plain, *together, *bursts, of_parameters, of_updates]


def train_step(
    structure: Any, run: Run, config: Config
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return functions that make the state of a run, take a step of it, and join owned parts."""
    channel = LossyChannel(rate=run.rate, burst=run.burst)
    lossy = LossyCollectives(
        axis_name="data", channel=channel, method=run.method, rows_together=run.rows_together
    )
    reliable = dataclasses.replace(lossy, channel=LossyChannel(rate=0.0))
    optimizer = make_optimizer(config.learning_rate, config.steps)
    if not run.decays:
        warm_up = optax.linear_schedule(0.0, config.learning_rate, config.steps // 10)
        optimizer = optax.adamw(warm_up, b2=0.95)
    gradient = jax.grad(loss_of(structure))
    mesh = jax.make_mesh((config.workers,), ("data",), axis_types=(AxisType.Auto,))

    def first(params: Params) -> Any:
        return params, optimizer.init(lossy.own_parts(params))

    def step(state: Any, tokens: Array, key: Array) -> tuple[Any, Array]:
        params, opt_state = state
        own = lossy.own_parts(params)
        mean = lossy.scatter_mean(gradient(params, tokens), key=key)
        updates, opt_state = optimizer.update(mean, opt_state, own)
        if run.broadcast == "parameters":
            params = lossy.broadcast(optax.apply_updates(own, updates), params, key=key)
        else:  # those that are missed stay zero, and nothing makes up for them
            zeros = jax.tree.map(jnp.zeros_like, params)
            params = optax.apply_updates(params, lossy.broadcast(updates, zeros, key=key))
        return (params, opt_state), drift(params, "data")

    def joined(state: Any, key: Array) -> Params:
        params, _ = state
        return reliable.broadcast(reliable.own_parts(params), params, key=key)

    def on_workers(function: Callable[..., Any], replicated: Sequence[int]) -> Any:
        """Map a function over workers, whose values have a leading axis."""

        def local(*args: Any) -> Any:
            own = [
                arg if i in replicated else jax.tree.map(lambda leaf: leaf[0], arg)
                for i, arg in enumerate(args)
            ]
            return jax.tree.map(lambda leaf: leaf[None], function(*own))

        def mapped(*args: Any) -> Any:
            specs = tuple(P() if i in replicated else P("data") for i in range(len(args)))
            return jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False
            )(*args)

        return jax.jit(mapped)

    return on_workers(first, (0,)), on_workers(step, (2,)), on_workers(joined, (1,))


def measuring(
    structure: Any, params: Params, corpora: Corpora, config: Config, run: Run
) -> Callable[[int], dict[str, Any]]:
    """Return a function that fine-tunes with a seed: evaluation losses, and drift by step."""
    first, step, joined = train_step(structure, run, config)
    evaluate = evaluator(structure, all_windows(corpora.held_out, context=config.context))

    def measure(seed: int) -> dict[str, Any]:
        state, drifts = first(params), []
        for number, tokens in enumerate(batches_of(corpora.reference, config, seed)):
            key = jax.random.fold_in(jax.random.key(seed), number)
            state, metrics = step(state, tokens, key)
            drifts.append(float(metrics[0]))
        of_first = jax.tree.map(lambda leaf: leaf[0], (state[0], joined(state, key)))
        of_worker, of_owners = map(evaluate, of_first)
        square = float(optax.global_norm(of_first[1])) ** 2
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return {
            "loss": of_owners,
            "loss_of_a_worker": of_worker,
            "drift": drifts,
            "mean_square": square / size,  # of the parameters
        }

    return measure


def measure_messages(method: str, config: Config) -> dict[str, Any]:
    """Measure one reduction of made-up gradients: its error, and the share of values that is lost.

    Errors are vNMSE: squared, over the squared norm of the mean of the gradients.
    """
    gradients = jnp.asarray(worker_gradients(config.workers, config.message_size, seed=0))

    def estimate(gradient: Array, rate: float, together: bool = False) -> Array:
        channel = LossyChannel(rate=rate)
        lossy = LossyCollectives(
            axis_name="data", channel=channel, method=method, rows_together=together
        )
        return lossy.scatter_mean(gradient, key=jax.random.key(0))

    def lost_share(gradient: Array, channel: LossyChannel, together: bool = False) -> Array:
        axis = Axis("data", config.workers)
        call = Call(size=gradient.size, axis=axis, topology=AllToAll(), collective="psum_scatter")
        resolved = resolve_method(method)
        codec = resolved.bind(gradient, call, jax.random.key(0))
        spans = terms_of(resolved, codec).byte_spans(axis.index)
        if spans is None:
            return jnp.float32(jnp.nan)  # all, as a message has many packets
        if together:
            spans = spans.side_by_side()
        return 1 - jnp.mean(channel.chance_intact(spans, config.workers, axis.index))

    def local(gradient: Array) -> Any:
        independent = LossyChannel(rate=config.contrast_rate)
        bursts = dataclasses.replace(independent, burst=config.burst)
        means = [estimate(gradient, rate) for rate in (0.0, config.contrast_rate)]
        means.append(estimate(gradient, config.contrast_rate, together=True))
        shares = [lost_share(gradient, channel) for channel in (independent, bursts)]
        return means, [*shares, lost_share(gradient, independent, together=True)]

    means, shares = jax.jit(jax.vmap(local, axis_name="data"))(gradients)
    truth = gradients.mean(axis=0)
    errors = [float(dq.vnmse(mean.reshape(-1), truth)) for mean in means]
    lost = [float(share[0]) if jnp.isfinite(share[0]) else None for share in shares]
    return {
        "method": method,
        "lost": lost[0],
        "lost_in_bursts": lost[1],
        "lost_with_rows_together": lost[2],
        "error": errors[0],
        "error_under_loss": errors[1],
        "error_with_rows_together": errors[2],
    }


def table_of_messages(messages: list[dict[str, Any]]) -> Table:
    """Make a table with one line for each method."""
    columns = (
        Column("gradients", "method"),
        Column("values lost", share_of("lost")),
        Column("in bursts", share_of("lost_in_bursts")),
        Column("rows together", share_of("lost_with_rows_together")),
        Column("error", "error", "{:.2g}"),
        Column("under loss", "error_under_loss", "{:.2g}"),
        Column("rows together", "error_with_rows_together", "{:.2g}"),
    )
    return table("One reduction of made-up gradients, without and with loss", columns, messages)


def share_of(name: str) -> Callable[[dict[str, Any]], str]:
    """Return a function that shows a share of a row, of which None are all."""
    return lambda row: "all" if row[name] is None else f"{row[name]:.1%}"


@benchmark("research/packet_loss")
def main(config: Config) -> Iterator[Report]:
    """Train with every rate; report after each run, since all of them take long."""
    jax.config.update("jax_num_cpu_devices", config.workers)
    console = Console()
    corpora = load_corpora()
    with console.status("Pre-training"):
        structure, params = pretrained(corpora, steps=config.pretrain_steps, width=config.width)
    with console.status("Messages"):
        messages = [measure_messages(method, config) for method in config.message_methods]
    known = earlier_runs(config) if config.resume else {}
    results: list[dict[str, Any]] = []
    make = functools.partial(measuring, structure, params, corpora, config)
    for kind, seeds in train_every(config.runs, config.seeds, make, known):
        results.append({**dataclasses.asdict(kind), "gradients": kind.gradients, "seeds": seeds})
        rows = with_offsets(results)
        yield Report(
            results={"messages": messages, "training": rows},
            shown=[table_of_messages(messages), as_table(rows)],
            # The figure needs all runs.
            draw=functools.partial(draw, rows) if len(rows) == len(config.runs) else None,
        )


def earlier_runs(config: Config) -> dict[Run, list[dict[str, Any]]]:
    """Return the runs of the result file, if its options are the same."""
    of_runs = "methods", "rates", "burst", "contrast_rate", "save", "resume"
    of_messages = "message_methods", "message_size"
    config_of_all = dataclasses.asdict(config)
    earlier = files.earlier_results(
        files.path_of("research/packet_loss"), config_of_all, but=of_runs + of_messages
    )
    names = [field.name for field in dataclasses.fields(Run)]
    rows = earlier["training"] if earlier else []
    return {Run(**{name: row[name] for name in names}): row["seeds"] for row in rows}


def with_offsets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the losses relative to those of the first run, and of the first run of the method."""

    def losses(row: dict[str, Any]) -> Array:
        return np.array([seed["loss"] for seed in row["seeds"]])

    rows = []
    for row in results:
        same = next(other for other in results if other["method"] == row["method"])
        off, own = (losses(row) / losses(other) - 1 for other in (results[0], same))
        rows.append({**row, "off": off.tolist(), "off_own_method": own.tolist()})
    return rows


def as_table(results: list[dict[str, Any]]) -> Table:
    """Make a table with one line for each kind of run."""
    columns = (
        Column("gradients", "gradients"),
        Column("broadcast", "broadcast"),
        Column("learning rate", lambda row: "decays" if row["decays"] else "constant"),
        Column("lost", "rate", "{:.0%}"),
        Column("burst", lambda row: row["burst"] or 1 / (1 - row["rate"]), "{:.1f}"),
        Column("loss", lambda row: np.mean([seed["loss"] for seed in row["seeds"]]), "{:.4f}"),
        Column("off", lambda row: np.mean(row["off"]), "{:+.2%}"),
        Column("of each seed", lambda row: "  ".join(f"{off:+.2%}" for off in row["off"])),
        Column("largest drift", largest_drift, "{:.2%}"),
    )
    return table("Evaluation loss after fine-tuning, against no loss of packets", columns, results)


def relative_drift(seed: dict[str, Any]) -> Any:
    """Return the root mean square difference of two workers over that of parameters, by step."""
    return np.sqrt(np.array(seed["drift"]) / seed["mean_square"])


def largest_drift(row: dict[str, Any]) -> float:
    """Return the largest relative drift of a run, mean over the seeds."""
    return float(np.mean([relative_drift(seed).max() for seed in row["seeds"]]))


def draw(results: list[dict[str, Any]]) -> Figure:
    """Draw the loss against the rate, and drift over time for both kinds of broadcast."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    of_loss, of_drift = figure.subplots(1, 2)
    plain = [row for row in results if row["decays"]]
    series = dict.fromkeys(row["gradients"] for row in plain)
    colors = dict(zip(series, ("#1864ab", "#e8590c", "#2b8a3e", "#862e9c"), strict=False))
    for name, color in colors.items():
        mine = [row for row in plain if row["gradients"] == name]
        line = sorted((row for row in mine if not row["burst"]), key=lambda row: row["rate"])
        for rows, style, label in (
            (line, "o-", name),
            ([row for row in mine if row["burst"]], "D", f"{name}, in bursts"),
        ):
            offs = 100 * np.array([row["off"] for row in rows])
            middle = offs.mean(axis=1)
            spread = np.abs(np.stack([offs.min(axis=1), offs.max(axis=1)]) - middle)
            rates = [100 * row["rate"] for row in rows]
            of_loss.errorbar(rates, middle, spread, fmt=style, color=color, capsize=3, label=label)
    of_loss.axhline(0, color="black", linewidth=0.8)
    of_loss.set(
        xlabel="packets lost (%)",
        ylabel="evaluation loss against no loss of packets (%)",
        title="Final loss of training",
    )
    of_loss.legend(frameon=False)
    constant = {row["broadcast"]: row for row in results if not row["decays"]}
    for broadcast, color, label in (
        ("updates", "#c92a2a", "updates are broadcast: grows"),
        ("parameters", "#2b8a3e", "parameters are broadcast: bounded"),
    ):
        curves = 100 * np.array([relative_drift(seed) for seed in constant[broadcast]["seeds"]])
        of_drift.plot(curves.mean(axis=0), color=color, label=label, linewidth=2)
    of_drift.set(
        xlabel="step",
        ylabel="difference of two workers (% of parameters)",
        title=f"Drift at {constant['updates']['rate']:.0%} loss, constant learning rate",
        ylim=(0, None),
    )
    of_drift.legend(frameon=False)
    for axis in (of_loss, of_drift):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    run(main, __doc__)
