"""Error of an all-reduce of the whole gradient of a real language model.

    make demo-llm
    python -m benchmarks.real_lm.errors
    python -m benchmarks.real_lm.training --methods exact
    python -m benchmarks.real_lm.errors --model results/real_lm_training/exact-0/model

The last two commands train the model for 150 steps, and take its gradients after them.

All tensors travel as a trainer sends them: in default buckets, norms exact. Errors are of the whole
gradient, of kinds of tensors and of layers. Rows that the result file has are not measured again.
Eight workers take 16 GB of memory.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.timing import timed
from benchmarks.real_lm.folder import check_folder, origin
from benchmarks.real_lm.gradients import KINDS, kind_of, layer_of, worker_gradients
from benchmarks.real_lm.policies import POLICIES
from benchmarks.real_lm.texts import Text
from dynamiq_jax._console import tables
from dynamiq_jax._measurement.devices import AXIS, make_mesh
from dynamiq_jax._measurement.settings import installed
from dynamiq_jax._measurement.simulate import make_devices

# Compression of a row, which the gradients of all workers may decide.
Setting = Callable[[dict[str, Any], dict[str, Array]], dq.Compression]
# Before a method: rows of `research.benchmarks.real_lm_allocated`, in the same file.
ALLOCATED = "allocated "
# The first ones are those of the gradient.
OF_GRADIENT = ("model", "step", "text", "workers", "batch", "context")
KEY = (*OF_GRADIENT, "topology", "bucketing", "method", "seed")
METHODS = installed(
    (
        "bf16",
        "dynamiq:3",
        "dynamiq:4",
        "dynamiq:5",
        "dynamiq:6",
        "paper:5",
        "blockint:5",
        "blockint:8",
        "mxfp4",
        "mxfp6",
        "mxfp8",
        "mxint8",
        "topk_chunked:5",
        "powersgd",
        "thc",
    )
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: Path = Path("results/smollm2")
    """Folder of the model. That of a run of training says which, and after how many steps."""

    texts: tuple[Text, ...] = ("chats", "plain")
    """Kinds of text."""

    methods: tuple[str, ...] = METHODS
    """METHOD[:BITS][:FIELD=VALUE], or the name of one of POLICIES."""

    topologies: tuple[str, ...] = ("ring",)
    """ring, butterfly, all_to_all."""

    bucketing: Literal["auto", "striped", "in_order"] = "auto"
    """How leaves are put into buckets, as in dq.Compression: striped on the ring by default, and in
    order on topologies that overlap with the backward pass."""

    workers: tuple[int, ...] = (8,)
    """Numbers of workers."""

    seeds: int = 1
    """Seeds of the rounding."""

    batch: int = 2
    """Rows of each worker."""

    context: int = 256
    """Tokens of a row."""


@benchmark("real_lm_errors")
def main(config: Config) -> Iterator[Report]:
    """Measure what the result file lacks."""
    return reports(config, setting_of)


def setting_of(row: dict[str, Any], stacked: dict[str, Array]) -> dq.Compression:
    """Return the compression of a row."""
    method = POLICIES.get(row["method"], row["method"])
    return dq.Compression(method, row["topology"], bucketing=row["bucketing"])


def reports(config: Config, setting: Setting) -> Iterator[Report]:
    """Measure what the result file lacks; report after each row, since all of them take long."""
    check_folder(config.model)
    model, step = origin(config.model)
    make_devices(max(config.workers))
    rows = earlier_rows()
    done = {tuple(row[key] for key in KEY) for row in rows}
    console = tables.console()
    for text, workers in itertools.product(config.texts, config.workers):
        of_gradient = {
            "model": model,
            "step": step,
            "text": text,
            "workers": workers,
            "batch": config.batch,
            "context": config.context,
        }
        wanted = [
            of_gradient
            | {"topology": topology, "bucketing": config.bucketing, "method": method, "seed": seed}
            for topology in config.topologies
            for method in config.methods
            for seed in range(config.seeds)
        ]
        missing = [row for row in wanted if tuple(row[key] for key in KEY) not in done]
        if not missing:
            continue
        with console.status(f"Gradients of {workers} workers, {text}"):
            stacked, mean = gradients(config, text, workers)
        for row in missing:
            with console.status(f"{row}"):
                errors, seconds = timed(functools.partial(measured, stacked, mean, row, setting))
            row |= errors | files.stamp()
            console.print(f"{row['method']}: {row['vnmse']:.2e}, {seconds:.0f} s", soft_wrap=True)
            rows.append(row)
            yield Report(results=rows, options={})
    yield Report(shown=[as_table(rows)])


def earlier_rows() -> list[dict[str, Any]]:
    """Read the rows of the result file."""
    path = files.path_of("real_lm_errors")
    if not path.exists():
        return []
    saved = json.loads(path.read_text())
    # Files had one model once, which they named above the rows.
    return [saved["config"] | row for row in saved["results"]]


def gradients(
    config: Config, text: Text, workers: int
) -> tuple[dict[str, Array], dict[str, NDArray]]:
    """Return the gradients of all workers, each on a device of its own, and their mean, float64."""
    mesh = make_mesh(jax.devices()[:workers])
    parts: dict[str, list[Array]] = {}
    sums: dict[str, NDArray] = {}
    each = worker_gradients(
        config.model, text, workers=workers, batch=config.batch, context=config.context
    )
    for gradient, device in zip(each, mesh.devices.flat, strict=True):
        for name, leaf in gradient.items():
            parts.setdefault(name, []).append(jax.device_put(leaf[None], device))
            sums.setdefault(name, np.zeros(leaf.shape))
            sums[name] += leaf
    split = NamedSharding(mesh, P(AXIS))
    stacked = {
        name: jax.make_array_from_single_device_arrays((workers, *sums[name].shape), split, leaves)
        for name, leaves in parts.items()
    }
    return stacked, {name: total / workers for name, total in sums.items()}


def measured(
    stacked: dict[str, Array], mean: dict[str, NDArray], row: dict[str, Any], setting: Setting
) -> dict[str, Any]:
    """Return the errors of one all-reduce, and its bits for each coordinate."""
    workers, compression = row["workers"], setting(row, stacked)
    found = reduced(stacked, make_mesh(jax.devices()[:workers]), row["seed"], compression)
    squares = {name: float(np.sum((found[name] - mean[name]) ** 2)) for name in mean}
    norms = {name: float(np.sum(exact**2)) for name, exact in mean.items()}

    def relative(names: list[str]) -> float:
        return sum(squares[n] for n in names) / sum(norms[n] for n in names)

    of_kind = {kind: [n for n in mean if kind_of(n) == kind] for kind in KINDS}
    of_layer: dict[str, list[str]] = {}
    for name in mean:
        if (layer := layer_of(name)) is not None:
            of_layer.setdefault(str(layer), []).append(name)
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, "float32") for name, leaf in mean.items()}
    report = dq.wire_report(shapes, workers, compression)
    size = sum(leaf.size for leaf in mean.values())
    return {
        "bits": 8 * report.bytes_per_worker / (2 * (workers - 1) / workers * size),
        "vnmse": relative(list(mean)),
        "of_kind": {kind: relative(names) for kind, names in of_kind.items()},
        "energy_of_kind": {
            kind: sum(norms[n] for n in names) / sum(norms.values())
            for kind, names in of_kind.items()
        },
        "of_layer": {layer: relative(names) for layer, names in of_layer.items()},
    }


def reduced(
    stacked: dict[str, Array], mesh: Mesh, seed: int, setting: dq.Compression
) -> dict[str, NDArray]:
    """Return the mean that all workers get, in the memory of one of them."""

    def local(tree: dict[str, Array]) -> dict[str, Array]:
        own = {name: leaf[0] for name, leaf in tree.items()}
        method = setting.method
        if not (isinstance(method, dq.methods.Method) and method.is_stateful):
            return dq.pmean(own, AXIS, setting, key=jax.random.key(seed))
        reduce = dq.all_reduce_gradients(AXIS, setting, seed=seed)
        return reduce.update(own, reduce.init(own))[0]  # the first step

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P()))
    return {name: np.asarray(leaf.addressable_data(0)) for name, leaf in mapped(stacked).items()}


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Tabulate mean errors over seeds, with those settings beside the method that differ."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in KEY[:-1]), []).append(row)
    differ = {key for key in KEY[:-1] if len({row[key] for row in rows}) > 1} | {"method"}
    columns = [Column(key, (0, key)) for key in KEY[:-1] if key in differ]
    columns += [
        Column("bits", (0, "bits"), "{:.2f}"),
        Column("all", lambda of_seeds: np.mean([row["vnmse"] for row in of_seeds]), "{:.1e}"),
    ]
    columns += [Column(kind, functools.partial(_mean_of_kind, kind), "{:.1e}") for kind in KINDS]
    return table("vNMSE", columns, list(groups.values()))


def _mean_of_kind(kind: str, of_seeds: list[dict[str, Any]]) -> float:
    return float(np.mean([row["of_kind"][kind] for row in of_seeds]))


if __name__ == "__main__":
    run(main, __doc__)
