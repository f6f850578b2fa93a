"""Error of remembered support, of count sketches, and of both, at equal bytes.

    python -m research.benchmarks.split_sketch

The gradients are those of consecutive steps of fine-tuning a small language model with the exact
mean. Methods see all of them in order, and errors are means over the last steps. All are without
error feedback. Numbers are sent as bfloat16.

    second round     a count sketch for half of the numbers; the other half are exact values of the
                     coordinates with the largest estimates, which takes a second round
    sketch alone     SplitSketch(hot=0)
    memory alone     SplitSketch(hot=1), without a sketch
    hot 15/16, 3/4   SplitSketch: the rest of the numbers is the sketch
    oracle           the largest coordinates of the sum, without a cost for their indices
    TopKChunked      the largest blocks, by norms that are sent
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track
from rich.table import Table

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.small_lm.corpora import load_corpora
from benchmarks.training.small_lm.gradients import gradient_snapshots
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax._measurement.gradient_files import LARGE
from dynamiq_jax.methods import Axis, Call, Method
from dynamiq_jax.topologies import resolve_topology
from dynamiq_research import SplitSketch, TopKChunked
from dynamiq_research.split_sketch.count_sketch import CountSketch

_AXIS = "data"
_ROWS = 3
_NUMBER_BITS = 16  # of bfloat16
# Gradients of all workers, [workers, size], and the number of the step, to the sum.
Reduce = Callable[[np.ndarray, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    first: int = 20  # training step that methods see first
    steps: int = 40  # consecutive steps
    measured: int = 10  # the last of them, whose errors are averaged
    workers: int = 4
    bits: tuple[float, ...] = (1.0, 2.0)  # 1/16 and 1/8 of the numbers, in bfloat16
    pretrain_steps: int = 240  # steps of pre-training before
    save: bool = True  # write the result to research/benchmarks/results/split_sketch.json


def gradients(config: Config) -> Iterator[np.ndarray]:
    """Yield the gradients of each step, float32 [workers, size]; small leaves are left out."""
    corpora = load_corpora()
    structure, params = pretrained(corpora, steps=config.pretrain_steps)
    steps = range(config.first, config.first + config.steps)
    for _, tree in gradient_snapshots(
        structure, params, corpora.reference, workers=config.workers, steps=steps
    ):
        large = [leaf for leaf in jax.tree.leaves(tree) if leaf[0].size >= LARGE]
        yield np.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in large], axis=1)


def by_method(method: Method, call: Call) -> Reduce:
    """Return a reduction that carries the state of a method from step to step."""

    @jax.jit
    def step(stacked, key, state):
        def local(flat, state):
            reduced = method.all_reduce(flat, call, key, state)
            return reduced.total, reduced.state

        return jax.vmap(local, axis_name=_AXIS)(stacked, state)

    start = jax.vmap(lambda _: method.init_state(call))(jnp.arange(call.num_workers))
    states = [start]

    def reduce(stacked: np.ndarray, number: int) -> np.ndarray:
        total, states[0] = step(stacked, jax.random.key(number), states[0])
        return np.asarray(total[0])

    return reduce


def by_second_round(numbers: int) -> Reduce:
    """Return a reduction by a sketch, and by exact values where its estimates are largest."""

    @jax.jit
    def estimate(total, key):
        sketch = CountSketch.draw(key, total.size, _ROWS, numbers // 2 // _ROWS)
        return sketch.decode(sketch.encode(total), lambda rows: jnp.median(jnp.stack(rows), axis=0))

    def reduce(stacked: np.ndarray, number: int) -> np.ndarray:
        total = stacked.sum(axis=0)
        return largest(np.asarray(estimate(total, jax.random.key(number))), total, numbers // 2)

    return reduce


def largest(weights: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Return the values where weights are largest in magnitude, and zeros elsewhere."""
    places = np.argpartition(-np.abs(weights), count)[:count]
    result = np.zeros_like(values)
    result[places] = values[places]
    return result


def reductions(bits: float, call: Call) -> dict[str, Reduce]:
    """Return the reductions that are compared at one budget."""
    numbers = int(bits / _NUMBER_BITS * call.size)

    def oracle(stacked: np.ndarray, number: int) -> np.ndarray:
        total = stacked.sum(axis=0)
        return largest(total, total, numbers)

    return {
        "second round": by_second_round(numbers),
        "sketch alone": by_method(SplitSketch(bits=bits, hot=0.0), call),
        "memory alone": by_method(SplitSketch(bits=bits, hot=1.0), call),
        "hot 15/16": by_method(SplitSketch(bits=bits), call),
        "hot 3/4": by_method(SplitSketch(bits=bits, hot=0.75), call),
        "oracle": oracle,
        "TopKChunked": by_method(TopKChunked(bits=bits), call),
    }


@benchmark("research/split_sketch")
def main(config: Config) -> Report:
    """Measure every reduction on the same gradients."""
    cases: dict[tuple[float, str], Reduce] = {}
    errors: dict[tuple[float, str], list[float]] = {}
    size = 0
    steps = track(gradients(config), "Training and reducing", total=config.steps, transient=True)
    for number, stacked in enumerate(steps):
        size = stacked.shape[1]
        if not cases:
            call = Call(
                size=size, axis=Axis(_AXIS, config.workers), topology=resolve_topology("all_to_all")
            )
            for bits in config.bits:
                made = reductions(bits, call)
                cases |= {(bits, name): reduce for name, reduce in made.items()}
        truth = stacked.sum(axis=0, dtype=np.float64)
        for case, reduce in cases.items():
            error = np.sum((reduce(stacked, number) - truth) ** 2) / np.sum(truth**2)
            errors.setdefault(case, []).append(float(error))
    results: list[dict[str, Any]] = []
    for (bits, name), of_steps in errors.items():
        mean = float(np.mean(of_steps[-config.measured :]))
        results.append({"bits": bits, "name": name, "vnmse": mean, "first": of_steps[0]})
    return Report(
        results=results,
        shown=[as_table(results, size)],
        options=files.options_of(config) | {"size": size},
    )


def as_table(results: list[dict[str, Any]], size: int) -> Table:
    """Make a table with a line for each reduction and budget."""
    base = {row["bits"]: row["vnmse"] for row in results if row["name"] == "second round"}
    columns = (
        Column("sent", "name"),
        Column("bits", "bits", "{:g}"),
        Column("first step", "first", "{:.3f}"),
        Column("last steps", "vnmse", "{:.3f}"),
        Column("of second round", lambda row: row["vnmse"] / base[row["bits"]], "{:.2f}"),
    )
    return table(f"vNMSE, {size:,} coordinates", columns, results)


if __name__ == "__main__":
    run(main, __doc__)
