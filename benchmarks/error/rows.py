"""Error of each row of 256 coordinates, by the least width of a code: who pays for a small vNMSE.

    python -m benchmarks.error.dump_gradients --model smollm2 --text plain --batch 1 --context 64 \\
        --kinds embedding attention mlp norm --layers 15 --embedding-every 32 --workers 64 \\
        --output gradients.npz
    python -m benchmarks.error.rows --gradients gradients.npz

A row counts as noise if its squared error is above its energy: zeros would be closer. Beside the
gradients of the file, each tree has three vectors of 4096 at 1, 0.1 and 0.01 of their scale. Other
data is drawn here. Rows that the result file has are not measured again.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import NDArray
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.error.tensors import Recipe, load, make
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.real_lm.gradients import kind_of
from dynamiq_jax._console import tables
from dynamiq_jax._measurement.gradient_files import Gradients
from dynamiq_jax._measurement.settings import Setting
from dynamiq_jax._measurement.simulate import Simulation, make_devices, relative_errors
from dynamiq_jax.methods import DynamiQ, resolve_method
from dynamiq_jax.topologies import Topology, resolve_topology

NAME = "rows"
DRAWN = ("white noise", "student t noise", "sparse embedding")
VECTORS = {f"vector at {scale:g}": scale for scale in (1.0, 0.1, 0.01)}
KEY = ("data", "method", "least", "topology", "bucketing", "workers")
OTHERS = ("mxfp8", "mxfp4")  # which have one width


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    gradients: Path | None = None
    """.npz with arrays [workers, *shape], named as tensors of SmolLM2; None: drawn data alone."""

    thin: int = 1
    """Keep one of so many rows of each matrix of the file."""

    bits: tuple[float, ...] = (3.5, 4.0, 5.0, 6.0, 8.0)
    """Budgets of DynamiQ."""

    least: tuple[int, ...] = (2,)
    """Least widths that are measured beside the default; all were 2 once."""

    topologies: tuple[str, ...] = ("ring", "butterfly", "all_to_all")
    """Topologies."""

    bucketings: tuple[str, ...] = ("in_order", "striped")
    """How leaves are put into buckets, as in dq.Compression."""

    workers: tuple[int, ...] = (2, 8, 16, 64)
    """Numbers of workers."""

    bucket_mib: float = 1.0
    """Size of a bucket: small, so that the likeness of a model has several."""

    drawn: tuple[str, ...] = DRAWN
    """Data that is drawn."""

    folder: Path = Path("results/tensors")
    """Where drawn data is kept."""

    output: Path = files.path_of(NAME)
    """Result file."""


@dataclasses.dataclass(frozen=True)
class Bucketed(Setting):
    """A setting with options of its own."""

    options: dq.Compression = dataclasses.field(default_factory=dq.Compression)

    def all_reduce(self, tree: Any, axis_name: str, key: Array) -> Any:
        """Sum float32 arrays over an axis."""
        assert self.method is not None and self.topology is not None
        compression = dataclasses.replace(self.options, method=self.method, topology=self.topology)
        return dq.psum(tree, axis_name, compression, key=key)


@benchmark(NAME)
def main(config: Config) -> Iterator[Report]:
    """Measure what the result file lacks."""
    make_devices(max(config.workers))
    console = tables.console()
    rows = json.loads(config.output.read_text())["results"] if config.output.exists() else []
    done = {tuple(row[key] for key in KEY) for row in rows}
    options = {"bucket_mib": config.bucket_mib}  # all else is in the rows
    for data, whole in trees(config):
        for case in cases(config):
            row = {"data": data} | case
            if tuple(row[key] for key in KEY) in done:
                continue
            workers = row["workers"]
            if not resolve_topology(row["topology"]).supports(workers):
                continue
            rows.append(
                row
                | {"thin": config.thin}
                | measured(of_workers(whole, workers), row, config)
                | files.stamp()
            )
            console.print(*(f"{row[key]}" for key in KEY), f"{rows[-1]['above_half']:.2%}")
            yield Report(results=rows, options=options)
    yield Report(results=rows, options=options, shown=[as_table(rows)])


def trees(config: Config) -> Iterator[tuple[str, Gradients]]:
    """Yield the names of data and its gradients, [workers, *shape]."""
    if config.gradients is not None:
        with np.load(config.gradients) as stored:
            tree = {
                name: leaf if leaf.ndim < 3 else leaf[:, :: config.thin].copy()
                for name, leaf in ((name, stored[name]) for name in stored.files)
            }
        yield "smollm2", with_vectors(tree)
    if not config.drawn:
        return
    recipe = Recipe(workers=max(config.workers), size=2**18)
    folder = make(recipe, config.folder, config.drawn)
    for name in config.drawn:
        yield name, with_vectors({name: load(folder, name, recipe.workers)})


def with_vectors(tree: Gradients) -> Gradients:
    """Add vectors at several shares of the root mean square of all leaves."""
    size = sum(leaf.size for leaf in tree.values())
    square = sum(float(np.sum(np.square(leaf), dtype=np.float64)) for leaf in tree.values())
    workers, random = len(next(iter(tree.values()))), np.random.default_rng(0)
    drawn = {
        name: (scale * np.sqrt(square / size) * random.normal(size=(workers, 4096)))
        for name, scale in VECTORS.items()
    }
    return tree | {name: leaf.astype(np.float32) for name, leaf in drawn.items()}


def of_workers(tree: Gradients, workers: int) -> Gradients:
    """Return the gradients of the first workers."""
    return {name: leaf[:workers] for name, leaf in tree.items()}


def cases(config: Config) -> Iterator[dict[str, Any]]:
    """Yield all settings: those of few workers first."""
    methods = [
        (f"dynamiq:{bits:g}", least) for bits in config.bits for least in _leasts(config, bits)
    ]
    methods += [(name, None) for name in OTHERS]
    for workers, topology, bucketing, (method, least) in itertools.product(
        config.workers, config.topologies, config.bucketings, methods
    ):
        yield {
            "method": method,
            "least": least,
            "topology": topology,
            "bucketing": bucketing,
            "workers": workers,
        }


def _leasts(config: Config, bits: float) -> list[int | None]:
    """List the least widths that a budget has room for; None for the default."""
    return [None, *(least for least in config.least if bits - 0.375 >= least)]


def measured(tree: Gradients, row: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the errors of one sum: of the whole tree, and of each kind of tensor."""
    method = resolve_method(row["method"])
    if row["least"] is not None:
        method = dataclasses.replace(method, widths=tuple(range(row["least"], 17)))
    topology = resolve_topology(row["topology"])
    bucketing = {"bucketing": row["bucketing"], "bucket_bytes": int(config.bucket_mib * 2**20)}
    options = dq.Compression(exact_below=0, **bucketing)
    found, _, _ = Simulation(Bucketed("", method, topology, options), tree).sums(tree, seed=0)
    of_leaf = {name: _flat(leaf.sum(0, np.float64)) for name, leaf in tree.items()}
    pairs: dict[str, list[tuple[NDArray, NDArray]]] = {}
    for name, truth in of_leaf.items():
        kind = name if name in (*VECTORS, *DRAWN) else kind_of(name)
        pairs.setdefault(kind, []).append((_flat(found[name]), truth))
    of_kind = {kind: errors_of(of) for kind, of in pairs.items()}
    return {
        "width": narrowest(method, topology, row["workers"]),
        **errors_of([pair for of in pairs.values() for pair in of]),
        "of_kind": of_kind,
    }


def narrowest(method: Any, topology: Topology, workers: int) -> int | None:
    """Return the least width of a sum; None for methods of one width."""
    if not isinstance(method, DynamiQ):
        return None
    layout = method.layout(1, workers, growth=topology.error_growth(workers))
    return min(layout.allocation.widths)


def errors_of(pairs: list[tuple[NDArray, NDArray]]) -> dict[str, Any]:
    """Return vNMSE, and what relative errors of rows are, of leaves with their true sums."""
    relative = np.concatenate([relative_errors(found, truth) for found, truth in pairs])
    squared = sum(float(np.sum((found - truth) ** 2)) for found, truth in pairs)
    return {
        "vnmse": squared / sum(float(truth @ truth) for _, truth in pairs),
        "above_half": float(np.mean(relative > 0.5)),
        "worse_than_zero": float(np.mean(relative > 1)),
        "worst": float(relative.max()),
    }


def _flat(leaf: NDArray) -> NDArray[np.float64]:
    return np.asarray(leaf, np.float64).reshape(-1)


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Tabulate all rows."""
    columns = [Column(key, key) for key in KEY[:2]]
    columns += [Column("least", lambda row: row["least"] or f"default, {row['width']}")]
    columns += [Column(key, key) for key in KEY[3:]]
    columns += [
        Column("vNMSE", "vnmse", "{:.2e}"),
        Column("above half", "above_half", "{:.2%}"),
        Column("worse than zero", "worse_than_zero", "{:.2%}"),
    ]
    return table("Errors of rows", columns, rows)


if __name__ == "__main__":
    run(main, __doc__)
