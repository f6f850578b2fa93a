"""Bias of correlated rounding: the part of the error of a sum that no number of keys averages out.

    python -m benchmarks.error.rounding_bias
    python -m benchmarks.error.rounding_bias --gradients gradients.npz

The squared error of one sum is compared with that of the mean over many keys. Independent rounding,
which has no bias, is measured beside it: as a check, and for what correlated rounding gains.
Gradients are synthetic, with rows of lognormal magnitude, and of a file of
`benchmarks.error.dump_gradients`, if one is given: the first coordinates of every leaf.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement import gradient_files
from dynamiq_jax._measurement.gradients import worker_gradients

TOPOLOGIES = ("ring", "butterfly", "all_to_all")
_SIZE = 2**15  # coordinates
_AGREEMENTS = (0.0, 0.1, 0.5, 0.99)  # share of the energy that all workers have in common


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    gradients: Path | None = None  # that benchmarks.error.dump_gradients wrote
    workers: tuple[int, ...] = (2, 4, 8, 16)
    bits: float = 5.0
    keys: int = 100
    save: bool = True  # write the result to benchmarks/results/rounding_bias.json


def tensors(config: Config) -> dict[str, NDArray[np.float32]]:
    """Return gradients of as many workers as are needed, float32 [workers, size]."""
    most = max(config.workers)
    made = {
        f"synthetic, agreement {share:g}": worker_gradients(most, _SIZE, 0, agreement=share)
        for share in _AGREEMENTS
    }
    if config.gradients is not None:
        for step, leaves in gradient_files.load(config.gradients).items():
            each = _SIZE // len(leaves)
            parts = [leaf.reshape(len(leaf), -1)[:most, :each] for leaf in leaves.values()]
            made[f"small model, {step}"] = np.concatenate(parts, axis=1)
    return made


def measure(
    gradients: NDArray[np.float32], topology: str, rounding: str, config: Config
) -> tuple[float, float]:
    """Measure the error of a sum over the workers of [workers, size].

    Returns:
      vNMSE, and the share of the squared error that is bias.
    """
    method = dq.DynamiQ(bits=config.bits, rounding=rounding)

    def reduced(values: jax.Array, key: jax.Array) -> jax.Array:
        return dq.psum(values, "data", key=key, method=dq.Compression(method, topology))

    function = jax.jit(jax.vmap(reduced, in_axes=(0, None), axis_name="data"))
    truth = gradients.sum(axis=0, dtype=np.float64)
    total, squares = np.zeros_like(truth), 0.0
    for seed in range(config.keys):
        error = np.asarray(function(gradients, jax.random.key(seed))[0], np.float64) - truth
        total += error
        squares += np.sum(error**2) / config.keys
    # The mean over few keys still has a share of the error that is no bias.
    of_mean = np.sum((total / config.keys) ** 2) / squares
    bias = (of_mean - 1 / config.keys) / (1 - 1 / config.keys)
    return float(squares / np.sum(truth**2)), float(bias)


COLUMNS = (
    Column("gradients", "gradients"),
    Column("workers", "workers"),
    Column("topology", "topology"),
    Column("bias, correlated", "bias", "{:.2%}"),
    Column("bias, independent", "bias_independent", "{:.2%}"),
    Column("error of independent / correlated", "gain", "{:.2f}"),
)


@benchmark("rounding_bias")
def main(config: Config) -> Report:
    """Measure every case."""
    cases = [
        (name, values[:workers], topology)
        for name, values in tensors(config).items()
        for workers in config.workers
        for topology in TOPOLOGIES
    ]
    results: list[dict[str, Any]] = []
    for name, values, topology in track(cases, transient=True):
        vnmse, bias = measure(values, topology, "correlated", config)
        independent, none = measure(values, topology, "independent", config)
        case = {"gradients": name, "workers": len(values), "topology": topology}
        shares = {"vnmse": vnmse, "bias": bias, "bias_independent": none}
        results.append(case | shares | {"gain": independent / vnmse})
    given = config.gradients and config.gradients.name
    return Report(
        results=results,
        shown=[
            table(
                f"share of the squared error that is bias, {config.bits:g} bits", COLUMNS, results
            )
        ],
        options=files.options_of(config) | {"gradients": given},
    )


if __name__ == "__main__":
    run(main, __doc__)
