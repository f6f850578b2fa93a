"""The least error that any code of so many bits could have, on the gradients of `compare`.

Shannon's rate-distortion function, for coordinates that are independent Gaussians with the
variances of their groups of 16: reverse water-filling (Cover and Thomas, Elements of Information
Theory, section 10.3.3). The decoder is told these variances for free, and a real code pays for
them, for being unbiased, for whole bits, and for levels that are fixed. A Gaussian is the hardest
source of its variance; peaks inside a group could make it a little easier.

Of the message that is gathered in the end, nothing else can bring the error below that. On a ring,
each chunk is coded as the sum of 1, 2, ... workers; errors of these are taken as independent.

    python -m benchmarks.error.dump_gradients --workers 16 --output gradients.npz
    python -m benchmarks.error.rate_distortion --gradients gradients.npz
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement import gradient_files

GROUP = 16  # coordinates that share a variance


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    gradients: Path  # that benchmarks.error.dump_gradients wrote
    workers: tuple[int, ...] = (8, 16)
    bits: tuple[float, ...] = (3.0, 4.0, 5.0, 6.0)
    save: bool = True  # write the result to the file of `output`
    output: Path = files.path_of("rate_distortion")


def least_error(values: NDArray[np.float64], bits: float) -> float:
    """Return the least squared error of any code for `values` [size] at so many bits each, if the
    decoder is told the variances for free.
    """
    variances = np.mean(values[: values.size // GROUP * GROUP].reshape(-1, GROUP) ** 2, axis=1)
    log2 = np.log2(variances[variances > 0])
    # The water level: what lies above it is coded down to it, what lies below is left out.
    low, high = log2.min() - 2 * bits * variances.size / log2.size, log2.max()
    for _ in range(60):
        level = (low + high) / 2
        rate = np.maximum(0, (log2 - level) / 2).sum() / variances.size
        low, high = (level, high) if rate > bits else (low, level)
    return GROUP * float(np.minimum(variances, 2.0**high).sum())


COLUMNS = (
    Column("", "step"),
    Column("workers", "workers"),
    Column("bits", "bits", "{:g}"),
    Column("gathered message alone", "message", "{:.1e}"),
    Column("ring", "ring", "{:.1e}"),
)


@benchmark("rate_distortion")
def main(config: Config) -> Report:
    """Compute every bound."""
    steps = gradient_files.load(config.gradients)
    results: list[dict[str, Any]] = []
    for step, gradients in track(steps.items(), "Filling", transient=True):
        for workers in config.workers:
            flat = np.concatenate(
                [leaf[:workers].reshape(workers, -1) for leaf in gradients.values()], axis=1
            )
            sums = np.cumsum(flat, axis=0, dtype=np.float64)
            energy = float(sums[-1] @ sums[-1])
            for bits in config.bits:
                errors = [least_error(partial, bits) / energy for partial in sums]
                row = {"step": step, "workers": workers, "bits": bits}
                results.append(row | {"message": errors[-1], "ring": sum(errors)})
    return Report(
        results=results,
        shown=[table("Least vNMSE of any code", COLUMNS, results)],
        options=files.options_of(config) | {"gradients": config.gradients.name},
    )


if __name__ == "__main__":
    run(main, __doc__)
