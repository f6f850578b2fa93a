"""Precision and cost of the error that metrics report, and a limit that holds in a hostile run.

python -m benchmarks.error.estimate

precision   estimated over true vNMSE, with a sample of its own in each of many steps: gradients
            of fine-tuning a small language model, made-up gradients, weights, white noise
cost        time of the mean on one CPU, for all workers and without a network, with metrics and
            without, in turns; the share of bytes is that of the sample
hostile     a run with dq.Compression(max_error=): from one step to another, its gradients are white
            noise in which one worker has spikes
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.timing import in_turns
from benchmarks.training.small_lm.corpora import load_corpora
from benchmarks.training.small_lm.gradients import gradient_snapshots
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax._measurement.gradients import worker_gradients

_AXIS = "data"
Values = NDArray[np.float32]  # [workers, size]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    bits: tuple[int, ...] = (4, 5, 6)
    workers: tuple[int, ...] = (2, 4, 16)
    keys: int = 10  # samples of each case
    size: int = 2**21  # coordinates of what is made up
    pretrain_steps: int = 120  # of the language model
    rounds: int = 40  # calls of each kind whose times are compared
    limit: float = 0.01  # of the hostile run, at 4 bits
    steps: int = 100  # of the hostile run
    hostile: tuple[int, int] = (50, 60)  # first hostile step, and the one after the last
    save: bool = True  # write benchmarks/results/error_estimate.json and .png


@benchmark("error_estimate")
def main(config: Config) -> Report:
    """Measure all three parts."""
    cases = len(config.bits) * len(config.workers) * 4
    measured = precisions(kinds(config), bits=config.bits, workers=config.workers, keys=config.keys)
    precision = list(track(measured, "Precision", total=cases, transient=True))
    cost, hostile = costs(config), hostile_run(config)
    again = [step for step, sent_again in enumerate(hostile["fallbacks"]) if sent_again]
    return Report(
        results={"precision": precision, "cost": cost, "hostile": hostile},
        shown=[
            precision_table(precision),
            f"time: {cost['share_of_time']:+.1%} of the codec of all workers on this machine, "
            f"bytes: {cost['share_of_bytes']:+.2%}",
            f"hostile run: largest error {max(hostile['error']):.1e} with a limit of "
            f"{config.limit:g}, sent again in steps {again}",
        ],
        draw=lambda: plot(hostile, config),
    )


def mean_of(method: str, **changes: Any) -> Callable[..., Any]:
    """Return a compiled mean of simulated workers: (key, values) to the mean and its metrics."""

    def local(key: jax.Array, values: jax.Array) -> Any:
        return dq.pmean(values, _AXIS, key=key, method=method, **changes)

    return jax.jit(jax.vmap(local, axis_name=_AXIS, in_axes=(None, 0)))


def vnmse(mean: jax.Array, values: Values) -> float:
    """Return the error of a mean, in float64."""
    truth = values.mean(axis=0, dtype=np.float64)
    return float(np.sum((np.asarray(mean, np.float64) - truth) ** 2) / np.sum(truth**2))


def kinds(config: Config) -> dict[str, Callable[[int], Values]]:
    """Return values by what they are: functions of the number of workers."""
    most = max(config.workers)
    corpora = load_corpora()
    structure, params = pretrained(corpora, steps=config.pretrain_steps)
    ((_, tree),) = gradient_snapshots(
        structure, params, corpora.reference, workers=most, steps=range(20, 21)
    )
    tuned = np.concatenate([leaf.reshape(most, -1) for leaf in jax.tree.leaves(tree)], axis=1)

    def noise(workers: int, seed: int) -> Values:
        return np.random.default_rng(seed).standard_normal((workers, config.size), np.float32)

    return {
        "fine-tuning": lambda workers: tuned[:workers],
        "made-up gradients": lambda workers: worker_gradients(workers, config.size, seed=0),
        "weights": lambda workers: np.float32(0.02) * noise(1, 1) + 1e-3 * noise(workers, 2),
        "white noise": lambda workers: noise(workers, 3),
    }


def precisions(
    data: Mapping[str, Callable[[int], Values]],
    *,
    bits: tuple[int, ...],
    workers: tuple[int, ...],
    keys: int,
) -> Iterator[dict[str, Any]]:
    """Yield estimated over true errors of every case.

    Args:
      data: kind of values to a function of the number of workers.
      bits: budgets of DynamiQ.
      workers: numbers of workers.
      keys: samples of each case.
    """
    for budget, count in itertools.product(bits, workers):
        run = mean_of(f"dynamiq:{budget}", with_metrics=True)
        for kind, values_of in data.items():
            values, ratios = np.asarray(values_of(count), np.float32), []
            for number in range(keys):
                mean, metrics = run(jax.random.key(number), values)
                ratios.append(float(metrics["error"][0]) / vnmse(mean[0], values))
            yield {"bits": budget, "workers": count, "kind": kind, "ratios": ratios}


def costs(config: Config) -> dict[str, float]:
    """Return the shares of time and bytes that metrics take."""
    workers = 4
    values = jax.device_put(worker_gradients(workers, config.size, seed=0))
    key = jax.random.key(0)
    runs = mean_of("dynamiq:5"), mean_of("dynamiq:5", with_metrics=True)
    calls = {place: functools.partial(run, key, values) for place, run in enumerate(runs)}
    seconds = in_turns(calls, config.rounds)
    plain, measured = map(statistics.median, seconds.values())
    report = dq.wire_report(values[0], workers, with_metrics=True)
    return {
        "seconds": plain,
        "seconds_with_metrics": measured,
        "share_of_time": measured / plain - 1,
        "share_of_bytes": report.sample_bytes / report.compressed_bytes,
    }


def hostile_run(config: Config) -> dict[str, Any]:
    """Return errors and fallbacks of every step of a run whose gradients turn hostile."""
    reduce = dq.all_reduce_gradients(
        _AXIS, method=dq.Compression("dynamiq:4", max_error=config.limit), with_metrics=True
    )
    unlimited = mean_of("dynamiq:4")
    size, workers = 2**18, 4
    update = jax.jit(
        jax.vmap(reduce.update, axis_name=_AXIS, in_axes=(0, None), out_axes=(0, None))
    )
    state = reduce.init(np.zeros(size, np.float32))
    curves: dict[str, Any] = {"error": [], "estimate": [], "fallbacks": [], "without_limit": []}
    for step in range(config.steps):
        values = worker_gradients(workers, size, seed=step)
        if config.hostile[0] <= step < config.hostile[1]:
            values = np.random.default_rng(step).standard_normal((workers, size), np.float32)
            values[0, :: 97 + step] *= 50
        mean, state = update(values, state)
        curves["error"].append(vnmse(mean[0], values))
        curves["estimate"].append(float(state.metrics["worst_error"]))
        curves["fallbacks"].append(int(state.metrics["fallbacks"]))
        curves["without_limit"].append(vnmse(unlimited(jax.random.key(step), values)[0], values))
    return curves


def precision_table(rows: list[dict[str, Any]]) -> Table:
    """Make a table of the means and standard deviations of ratios."""
    columns = (
        Column("values", "kind"),
        Column("bits", "bits"),
        Column("workers", "workers"),
        Column("mean", lambda row: statistics.fmean(row["ratios"]), "{:.2f}"),
        Column("standard deviation", lambda row: statistics.stdev(row["ratios"]), "{:.2f}"),
    )
    return table("Estimated over true error", columns, rows)


def plot(hostile: dict[str, Any], config: Config) -> Figure:
    """Draw the errors of the hostile run."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.axvspan(config.hostile[0] - 0.5, config.hostile[1] - 0.5, color="#f1f3f5")
    axis.axhline(config.limit, color="#868e96", lw=1, ls="--", label="max_error")
    axis.plot(hostile["without_limit"], color="#adb5bd", label="without a limit")
    # A sum that was sent again has an error of float32 alone.
    least = config.limit / 1e3
    axis.plot([max(e, least) for e in hostile["error"]], color="#d9480f", label="with it")
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("vNMSE of the mean")
    axis.set_title("Gradients turn hostile: the bucket is sent again, exactly", loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run(main, __doc__)
