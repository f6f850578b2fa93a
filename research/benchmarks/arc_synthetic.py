"""A problem in which local gradients are large where their sum is small: methods that choose blocks
by what each worker has, and `ARCTopK`, which chooses by the sum.

    python -m research.benchmarks.arc_synthetic

After the synthetic problem of the release of ARC-Top-K, rebuilt from its description: the
constants are those of the release, and the code is not. One block of signal is pulled towards one
target by all workers. In 150 other blocks, half of the workers pull towards a large value and half
towards its negative, which cancels in the sum. That value changes with the signal. 49 blocks do
nothing. All workers stay at the same parameters, and only the means of their gradients are
compressed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax.methods import Call, ErrorFeedback, Exact, Method, Reduced, State, WireCost
from dynamiq_research import EF21M, ARCTopK, TopKChunked
from dynamiq_research.ef21m import sums_applied
from pallas_kernels._jax.compat import override

BLOCK, BLOCKS, OPPOSED = 10, 200, 150  # coordinates of a block; blocks; those that cancel
SIZE = BLOCK * BLOCKS
OPPOSITION, COUPLING, TARGET = 100.0, 5.0, 1.0  # the pull, its change with the signal; the signal
NOISE = 1e-3  # standard deviation of the noise of a gradient
# Of the release, in which the momentum is a sum of gradients and not their mean: hence twice its
# learning rate of 0.001 with the mean.
MOMENTUM, LEARNING_RATE = 0.5, 2e-3
# All pulls cancel at this signal, and with zeros elsewhere.
OPTIMUM = (TARGET - COUPLING * OPPOSITION) / (1 + COUPLING**2)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workers: int = 10
    steps: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    chosen: int = 10  # blocks that a step sums, of 200
    rank: int = 2  # of the sketch
    save: bool = True  # write the result to research/benchmarks/results/arc_synthetic.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTopK(Method):
    """Top-k of blocks by the norms of each worker, which chooses for itself alone. The sum is
    exact, and its bytes are not counted.
    """

    chosen: int

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return Exact().wire_cost(call)

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        blocks = flat.reshape(-1, BLOCK)
        best = jax.lax.top_k(jnp.sum(blocks**2, axis=1), self.chosen)[1]
        kept = jnp.zeros_like(blocks).at[best].set(blocks[best]).reshape(-1)
        return Exact().all_reduce(kept, call, key, state)


sums_applied.register(LocalTopK, lambda method: True)


def compressors(config: Config) -> dict[str, Method]:
    """Return the methods, of which each sums as many blocks."""
    exact: dict[str, Any] = {"block_size": BLOCK, "inner": Exact()}

    def with_room(cls: type, **fields: Any) -> Method:
        # Bits of the scores, and of `chosen` blocks in full.
        probe = cls(bits=32.0, **exact, **fields)
        values = 32 * config.chosen / BLOCKS
        return dataclasses.replace(probe, bits=probe.score_bits / BLOCK + values + 0.05)

    return {
        "exact": Exact(),
        "local top-k": LocalTopK(chosen=config.chosen),
        "TopKChunked": with_room(TopKChunked),
        "ARCTopK": with_room(ARCTopK, rank=config.rank),
    }


def loss(parameters: Array, side: Array) -> Array:
    """Compute the loss of a worker on one side, 1 or -1, of the opposition."""
    blocks = parameters.reshape(BLOCKS, BLOCK)
    signal, others = blocks[OPPOSED], blocks[:OPPOSED]
    pulled = others - side * (OPPOSITION + COUPLING * signal)
    return 0.5 * (jnp.sum((signal - TARGET) ** 2) + jnp.sum(pulled**2) / OPPOSED)


def distance(parameters: Array) -> Array:
    """Return the distance of parameters from the optimum of the mean loss."""
    best = jnp.zeros((BLOCKS, BLOCK)).at[OPPOSED].set(OPTIMUM)
    return jnp.linalg.norm(parameters - best.reshape(-1))


@functools.cache
def descent(method: Method, workers: int, steps: int):
    """Return a function of a key to the distances after each step, [steps]."""
    reduce = dq.all_reduce_gradients("data", method=dq.Compression(method, exact_below=0))

    def worker(side: Array, noise_key: Array) -> Array:
        def step(carry: Any, key: Array) -> Any:
            parameters, state = carry
            noise = NOISE * jax.random.normal(key, (SIZE,))
            gradient = jax.grad(loss)(parameters, side) + noise
            mean, state = reduce.update(gradient, state)
            parameters = parameters - LEARNING_RATE * mean
            return (parameters, state), distance(parameters)

        start = jnp.zeros(SIZE)
        keys = jax.random.split(noise_key, steps)
        return jax.lax.scan(step, (start, reduce.init(start)), keys)[1]

    sides = jnp.where(jnp.arange(workers) < workers // 2, 1.0, -1.0)

    def run(key: Array) -> Array:
        keys = jax.random.split(key, workers)
        return jax.vmap(worker, axis_name="data")(sides, keys)[0]

    return jax.jit(run)


def measure(config: Config) -> list[dict[str, Any]]:
    """Return a row for each wrapper and method."""
    rows = []
    for name, inner in compressors(config).items():
        wrapped = {
            "EF21M": EF21M(inner=inner, momentum=MOMENTUM),
            "ErrorFeedback": ErrorFeedback(inner=inner),
        }
        for wrapper, method in wrapped.items():
            run = descent(method, config.workers, config.steps)
            curves = np.stack([np.asarray(run(jax.random.key(seed))) for seed in config.seeds])
            shown = np.linspace(0, config.steps - 1, 11).astype(int)
            rows.append(
                {
                    "wrapper": wrapper,
                    "method": name,
                    "steps": (shown + 1).tolist(),
                    "distances": curves[:, shown].tolist(),
                    "last": float(np.exp(np.mean(np.log(curves[:, -1])))),
                }
            )
    return rows


@benchmark("research/arc_synthetic")
def main(config: Config) -> Report:
    """Run every method."""
    rows = measure(config)
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        lines.setdefault(row["method"], {})[row["wrapper"]] = row["last"]
    columns = [Column("method", (0,))]
    columns += [
        Column(wrapper, (1, wrapper), "{:.2e}")
        for wrapper in dict.fromkeys(row["wrapper"] for row in rows)
    ]
    shown = table("distance from the optimum", columns, list(lines.items()))
    return Report(results=rows, shown=[shown])


if __name__ == "__main__":
    run(main, __doc__)
