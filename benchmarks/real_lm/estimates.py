"""Precision of the error that metrics report, on gradients of a real language model.

    make demo-llm
    python -m benchmarks.real_lm.estimates

As the first part of `benchmarks.error.estimate`: estimated over true vNMSE, with a sample of its
own in each of many steps.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path

from benchmarks.error.estimate import precision_table, precisions
from benchmarks.error.tensors import Recipe, load, make, names_of
from benchmarks.harness import files
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.real_lm.folder import check_folder


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: Path = Path("results/smollm2")  # folder of the model
    bits: tuple[int, ...] = (4, 5, 6)
    workers: tuple[int, ...] = (2, 4, 16)
    keys: int = 10  # samples of each case
    size: int = 2**21  # coordinates of each gradient: rows of it at equal distances
    folder: Path = Path(tempfile.gettempdir()) / "dynamiq-jax-tensors"  # gradients are kept here
    save: bool = True  # write benchmarks/results/real_lm_estimates.json


@benchmark("real_lm_estimates")
def main(config: Config) -> Report:
    """Measure every case."""
    check_folder(config.model)
    recipe = Recipe(workers=max(config.workers), size=config.size, model=config.model)
    names = names_of(recipe)
    folder = make(recipe, config.folder, names)
    data = {name: functools.partial(load, folder, name) for name in names}
    rows = list(precisions(data, bits=config.bits, workers=config.workers, keys=config.keys))
    return Report(
        results=rows,
        shown=[precision_table(rows)],
        options=files.options_of(config, but=("folder",)),
    )


if __name__ == "__main__":
    run(main, __doc__)
