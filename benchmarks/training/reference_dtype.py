"""What local SGD loses to the dtype of its parameters, and of its reference.

    python -m benchmarks.training.reference_dtype

Workers take the same local steps in float64, in float32 and in bfloat16, and average their changes
exactly, with an outer step of 1. The error is the distance of the reference from that of float64,
over the distance that it moved. A reference in float32 beside parameters in bfloat16, which
`LocalSGD` does not have, shows how much of it the reference loses. The algorithm is written out in
NumPy: no compression, no optimizer.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run

_SIZE = 2**14
_DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {  # of parameters and reference
    "float32": (np.float32, np.float32),
    "bfloat16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "bfloat16, reference in float32": (ml_dtypes.bfloat16, np.float32),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workers: int = 4
    rounds: int = 15
    every: tuple[int, ...] = (1, 20)  # local steps of a round
    steps: tuple[float, ...] = (1e-3, 3e-3, 1e-2)  # size of a local step over that of a parameter
    save: bool = True  # write the result to benchmarks/results/reference_dtype.json


def reference(
    dtypes: tuple[DTypeLike, DTypeLike], every: int, step: float, config: Config
) -> NDArray[np.float64]:
    """Return the reference after all rounds, less the first one: half of a step is common."""
    rng = np.random.default_rng(0)
    local, whole = dtypes
    start = rng.standard_normal(_SIZE).astype(ml_dtypes.bfloat16)
    common, now = rng.standard_normal(_SIZE), start.astype(whole)
    for _ in range(config.rounds):
        before, changes = now.astype(local), []
        for _ in range(config.workers):
            params = before
            for _ in range(every):
                own = rng.standard_normal(_SIZE)
                params = (params + (step * (common + own) / 2**0.5).astype(local)).astype(local)
            changes.append(before - params)
        mean = np.mean([change.astype(np.float64) for change in changes], axis=0).astype(local)
        now = (now - mean.astype(whole)).astype(whole)
    moved: NDArray[np.float64] = now.astype(np.float64) - start.astype(np.float64)
    return moved


COLUMNS = (
    Column("local steps", "every"),
    Column("size of a step", "step", "{:g}"),
    *(Column(name, name, "{:.2%}") for name in _DTYPES),
)


@benchmark("reference_dtype")
def main(config: Config) -> Report:
    """Measure every case."""
    results: list[dict[str, Any]] = []
    for every in config.every:
        for step in config.steps:
            truth = reference((np.float64, np.float64), every, step, config)
            case: dict[str, Any] = {"every": every, "step": step}
            for name, dtypes in _DTYPES.items():
                off = reference(dtypes, every, step, config) - truth
                case[name] = float(np.linalg.norm(off) / np.linalg.norm(truth))
            results.append(case)
    return Report(
        results=results, shown=[table("error of the reference, of its way", COLUMNS, results)]
    )


if __name__ == "__main__":
    run(main, __doc__)
