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

import tyro

from benchmarks import common
from benchmarks.error.estimate import precision_table, precisions
from benchmarks.error.tensors import Recipe, load, make, names_of
from benchmarks.real_lm.folder import check_folder
from dynamiq_jax._console import tables


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


def main(config: Config) -> None:
    """Measure, print the table, and write the result file."""
    check_folder(config.model)
    recipe = Recipe(workers=max(config.workers), size=config.size, model=config.model)
    names = names_of(recipe)
    folder = make(recipe, config.folder, names)
    data = {name: functools.partial(load, folder, name) for name in names}
    console = tables.console()
    rows = list(precisions(data, bits=config.bits, workers=config.workers, keys=config.keys))
    console.print(precision_table(rows))
    if config.save:
        options = dataclasses.asdict(config)
        del options["folder"]
        console.print(f"Written to {common.save('real_lm_estimates', options, rows)}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
