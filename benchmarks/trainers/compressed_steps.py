"""Train steps of other packages, as they are and by `dq.compress`: losses and bytes.

    python -m benchmarks.trainers.compressed_steps

Runs in an environment of its own, see `compressed-steps-requirements.txt` beside this file. Workers
are virtual devices of this machine, and every run is a process of its own. The trainings are in
`steps_of_others.py`.
"""

import dataclasses
import functools
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness import command, files
from benchmarks.harness.processes import in_process
from benchmarks.trainers.steps_of_others import TRAININGS, removed_functions

NUM_DEVICES = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    method: str = "dynamiq"  # compression
    runs: tuple[str, ...] = tuple(TRAININGS)  # trainings, by their keys in `TRAININGS`


@command.benchmark("compressed_steps")
def main(config: Config) -> Iterator[command.Report]:
    """Train with every package, exact and compressed."""
    packages = ("flax", "optax", *(TRAININGS[name].package for name in config.runs))
    options = files.options_of(config) | {"devices": NUM_DEVICES}
    options["versions"] = {package: metadata.version(package) for package in packages}
    results: list[dict[str, Any]] = []
    for name in config.runs:
        training = TRAININGS[name]
        row: dict[str, Any] = {"run": name, "title": training.title, "place": training.place}
        row["exact"], row["compressed"] = train(name, ""), train(name, config.method)
        results.append(row)
        yield command.Report(results=results, shown=[as_table(results)], options=options)


def train(name: str, method: str) -> dict[str, Any]:
    """Train in a process of its own, and return the losses and the sums of the compressed step.

    Args:
      name: key of `TRAININGS`.
      method: compression method; empty for the step as it is.
    """
    devices = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    measured: dict[str, Any] = in_process(train_here, name, method, environment=environment)
    return measured


def train_here(name: str, method: str) -> dict[str, Any]:
    """Train in this process: see `train`."""
    reports: list[Any] = []

    def wrap(step: Any, axis_name: str) -> Any:
        if not method:
            return step
        compressed = dq.compress(step, axis_name, method=method)

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not reports:
                reports.append(compressed.report(*args, **kwargs))
            return compressed(*args, **kwargs)

        return call

    with removed_functions():
        losses = TRAININGS[name].train(wrap)
    return {"losses": losses} | (described(reports[0]) if reports else {})


def described(report: Any) -> dict[str, Any]:
    """Count the sums of a step, and the bytes of its groups in one call, before and after."""
    grouped = [each for each in report.sums if each.group is not None]
    return {
        "sums_compressed": len(report.compressed),
        "sums_exact": len(report.sums) - len(report.compressed),
        "groups": report.num_groups,
        "bytes_before": sum(each.bytes_before * (each.times or 1) for each in grouped),
        "bytes_after": sum(each.bytes_after * (each.times or 1) for each in grouped),
    }


def as_table(results: list[dict[str, Any]]) -> Table:
    """Make a table with one line for each package."""
    table = Table(title="Train steps of others, exact and by dq.compress")
    table.add_column("package")
    for heading in (
        "first loss",
        "last, exact",
        "compressed",
        "sums",
        "bytes",
        "after",
        "of exact",
    ):
        table.add_column(heading, justify="right")
    for row in results:
        exact, compressed = row["exact"], row["compressed"]
        before, after = compressed["bytes_before"], compressed["bytes_after"]
        table.add_row(
            row["title"],
            f"{exact['losses'][0]:.4f}",
            *(f"{kind['losses'][-1]:.4f}" for kind in (exact, compressed)),
            f"{compressed['sums_compressed']} + {compressed['sums_exact']} exact",
            f"{before:,.0f}",
            f"{after:,.0f}",
            f"1/{before / after:.2f}",
        )
    return table


if __name__ == "__main__":
    command.run(main, __doc__)
