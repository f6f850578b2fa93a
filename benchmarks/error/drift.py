"""Drift of what is summed again and again: the same gradient in every round, with new noise.

    python -m benchmarks.error.drift

The mean over the rounds is compared with the mean over the workers. Noise averages out; what is
left is bias. The drift is that of the sum of all magnitudes. All-reduces, plain and in error
feedback, have rows of `kind` "all-reduce", and messages rows of `kind` "message".
Gradients are synthetic: rows of lognormal magnitude, with normal or heavy-tailed values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from numpy.typing import NDArray
from rich.progress import track

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax import islands
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax._measurement.settings import installed

_SIZE = 2**15  # coordinates
_TAILS = {"normal": None, "heavy-tailed": 3}  # degrees of freedom of Student's t


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    methods: tuple[str, ...] = installed(
        (
            *("dynamiq:5", "dynamiq:4", "dynamiq:3", "mxfp8", "mxfp4"),
            *("blockint:4", "blockint:4:rounding=stochastic", "topk_chunked:2", "powersgd:rank=4"),
        )
    )
    topologies: tuple[str, ...] = ("ring", "butterfly", "all_to_all")
    workers: int = 4
    rounds: int = 300
    message_methods: tuple[str, ...] = (
        *(f"dynamiq:{bits}" for bits in (3, 4, 5, 6)),
        *(f"dynamiq:{bits}:rounding=nearest" for bits in (3, 4, 5, 6)),
        *("mxfp4", "mxfp8", "blockint:4", "blockint:4:rounding=stochastic"),
    )
    message_rounds: int = 60
    save: bool = True  # write the result to benchmarks/results/drift.json


def drift(total: Any, truth: NDArray[np.float64]) -> dict[str, float]:
    """Return the drift of a mean over rounds, and its distance from the truth."""
    off = np.asarray(total, np.float64).reshape(-1) - truth
    along = off @ np.sign(truth) / np.sum(np.abs(truth))
    return {"drift": float(along), "distance": float(np.sqrt(off @ off / (truth @ truth)))}


def all_reduces(
    method: str, topology: str, rounds: int
) -> Callable[[NDArray[np.float32]], dict[str, float]]:
    """Return a function of [workers, rows, columns] to the drift of their mean."""
    reduce = dq.all_reduce_gradients("data", method=dq.Compression(method, topology))

    def mean_of_rounds(gradient: jax.Array) -> jax.Array:
        def one(carry: Any, _: Any) -> tuple[Any, None]:
            state, total = carry
            mean, state = reduce.update(gradient, state)
            return (state, total + mean), None

        mean, state = reduce.update(gradient, reduce.init(gradient))
        (_, total), _ = lax.scan(one, (state, mean), length=rounds - 1)
        return total / rounds

    compiled = jax.jit(jax.vmap(mean_of_rounds, axis_name="data"))

    def measure(gradients: NDArray[np.float32]) -> dict[str, float]:
        truth = gradients.mean(axis=0, dtype=np.float64).reshape(-1)
        return drift(compiled(gradients)[0], truth)

    return measure


def of_messages(change: NDArray[np.float32], method: str, rounds: int) -> dict[str, float]:
    """Measure the drift of a change that is sent again and again, and the error of one message."""
    total = np.zeros(change.size)
    for number in range(rounds):
        message = islands.encode([change], key=jax.random.key(number), method=method)
        (decoded,) = islands.decode(message).values()
        total += np.asarray(decoded, np.float64).reshape(-1) / rounds
    truth = change.astype(np.float64).reshape(-1)
    return {**drift(total, truth), "vnmse": float(dq.vnmse(decoded, change))}


COLUMNS = (
    Column("method", "method"),
    Column("topology", "topology"),
    Column("values", "values"),
    Column("drift, plain", "drift", "{:+.2%}"),
    Column("drift, error feedback", "drift_ef", "{:+.2%}"),
    Column("distance, plain", "distance", "{:.2%}"),
    Column("distance, error feedback", "distance_ef", "{:.2%}"),
)
MESSAGE_COLUMNS = (
    Column("method", "method"),
    Column("values", "values"),
    Column("drift", "drift", "{:+.2%}"),
    Column("distance", "distance", "{:.2%}"),
    Column("vNMSE of one", "vnmse", "{:.2e}"),
)


@benchmark("drift")
def main(config: Config) -> Report:
    """Measure every method."""
    tensors = {
        name: worker_gradients(config.workers, _SIZE, 0, tail=tail).reshape(config.workers, -1, 256)
        for name, tail in _TAILS.items()
    }
    results: list[dict[str, Any]] = []
    for method in track(config.methods, transient=True):
        for topology in config.topologies:
            plain, ef = (
                all_reduces(name, topology, config.rounds) for name in (method, f"ef+{method}")
            )
            for values, gradients in tensors.items():
                case = {"kind": "all-reduce", "method": method, "topology": topology}
                of_ef = {f"{name}_ef": value for name, value in ef(gradients).items()}
                results.append(case | {"values": values} | plain(gradients) | of_ef)
    messages = [
        {"kind": "message", "method": method, "values": values}
        | of_messages(gradients[0], method, config.message_rounds)
        for method in track(config.message_methods, transient=True)
        for values, gradients in tensors.items()
    ]
    return Report(
        results=[*results, *messages],
        shown=[
            table(f"drift after {config.rounds} rounds", COLUMNS, results),
            table(f"drift after {config.message_rounds} messages", MESSAGE_COLUMNS, messages),
        ],
    )


if __name__ == "__main__":
    run(main, __doc__)
