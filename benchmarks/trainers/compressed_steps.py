"""Train steps of other packages, as they are and by `dq.compress`: losses and bytes.

    python -m benchmarks.trainers.compressed_steps

The packages are in environments of their own, which `make test-trainers` makes. Workers are virtual
devices of this machine, and every training is a process of its own: see `measured.py`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.harness import command, files
from benchmarks.trainers.measured import TRAININGS, train


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    method: str = "dynamiq"  # compression
    runs: tuple[str, ...] = tuple(TRAININGS)  # trainings, by their keys in `TRAININGS`


@command.benchmark("compressed_steps")
def main(config: Config) -> Iterator[command.Report]:
    """Train with every package: as it is, and by `dq.compress`, exact and compressed.

    Trainings that are not asked for keep the rows of the result file.
    """
    options = files.options_of(config, but=["runs"])
    earlier = files.earlier_results(files.path_of("compressed_steps"), options, but=[]) or []
    rows = {row["run"]: row for row in earlier}
    for name in config.runs:
        training = TRAININGS[name]
        row: dict[str, Any] = {
            "run": name,
            "title": training.title,
            "place": training.place,
            "unwrapped": train(name, ""),
            "exact": train(name, "exact"),
            "compressed": train(name, config.method),
        }
        rows[name] = row | files.stamp()
        results = [rows[each] for each in TRAININGS if each in rows]
        yield command.Report(results=results, shown=[as_table(results)], options=options)


def as_table(results: list[dict[str, Any]]) -> Table:
    """Make a table with one line for each training."""
    table = Table(title="Train steps of others, as they are and by dq.compress")
    table.add_column("package")
    headings = "first loss", "last", "exact", "compressed", "sums", "bytes", "after", "of exact"
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in results:
        kinds = unwrapped, _, compressed = row["unwrapped"], row["exact"], row["compressed"]
        before, after = compressed["bytes_before"], compressed["bytes_after"]
        table.add_row(
            row["title"],
            f"{unwrapped['losses'][0]:.4f}",
            *(f"{kind['losses'][-1]:.4f}" for kind in kinds),
            f"{compressed['sums_compressed']} + {sum(compressed['sums_exact'].values())} exact",
            f"{before:,.0f}",
            f"{after:,.0f}",
            f"1/{before / after:.2f}",
        )
    return table


if __name__ == "__main__":
    command.run(main, __doc__)
