"""Error of a mean or a sum in two halves, relative to one all-reduce with the same budget.

    python -m research.benchmarks.halves

Pipelined      `training.Pipelined`: both halves of a mean, with correlated rounding as in `pmean`
psum_scatter   the parts of all workers together. It rounds once less than `pmean`

Each tensor is one bucket, so that all have the same budget. Most are vectors, of which
`psum_scatter` gives each worker a consecutive part. Of tensors with leaves, it gives every worker a
part of each leaf.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import dynamiq_jax as dq
from benchmarks.error import tensors
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._console import tables
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_research import Pipelined

_AXIS = "data"
_ONE_BUCKET = 2**30  # bytes, more than any tree of these
_TRAINED = ("transformer gradient 100", "decoder gradient 100")
_TRAINED_SIZE = 2**20
_ROW = 256

Tree = list[NDArray[np.float32]]  # leaves [workers, *shape]
Function = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workers: tuple[int, ...] = (2, 4, 8)
    bits: tuple[float, ...] = (3.0, 4.0, 5.0, 6.0)
    topologies: tuple[str, ...] = ("ring",)
    size: int = 2**20  # coordinates of a tensor: a multiple of 8192, and no more than that
    trained: bool = True  # gradients of trained models too, which takes minutes
    folder: Path = Path(tempfile.gettempdir()) / "dynamiq-jax-tensors"  # these are kept here
    seed: int = 0
    save: bool = True  # write the result to research/benchmarks/results/halves.json


COLUMNS = (
    Column("tensor", "tensor"),
    Column("topology", "topology"),
    Column("workers", "workers"),
    Column("bits", "bits", "{:g}"),
    Column("vNMSE of pmean", "pmean", "{:.2e}"),
    Column("Pipelined", lambda row: row["pipelined"] / row["pmean"], "{:.2f}"),
    Column("psum_scatter", lambda row: row["psum_scatter"] / row["pmean"], "{:.2f}"),
)


@benchmark("research/halves")
def main(config: Config) -> Report:
    """Measure all tensors."""
    console = tables.console()
    made = made_up(config.size, max(config.workers), config.seed)
    if config.trained:
        with console.status("Training"):
            made |= trained(config)
    rows: list[dict[str, Any]] = []
    cases = [
        (workers, bits, topology)
        for workers in config.workers
        for bits in config.bits
        for topology in config.topologies
    ]
    with tables.progress(console, "Measuring", len(cases) * len(made)) as advance:
        for workers, bits, topology in cases:
            measures = functions(bits, topology, config.seed)
            for name, tree in made.items():
                errors = measure(measures, [leaf[:workers] for leaf in tree])
                about = {"tensor": name, "workers": workers, "bits": bits, "topology": topology}
                rows.append(about | errors)
                advance(f"{name}, {workers} workers, {bits:g} bits")
    title = "Error of halves relative to that of one all-reduce"
    return Report(results=rows, shown=[table(title, COLUMNS, rows)])


# ------------------------------------------------------------------------------------------ tensors


def made_up(size: int, workers: int, seed: int) -> dict[str, Tree]:
    """Make tensors whose scales differ between regions, rows or leaves."""
    white = worker_gradients(workers, size, seed, octaves=0.0)

    def scaled(*scales: float) -> NDArray[np.float32]:
        """Scale consecutive regions of equal size."""
        return white * np.repeat(np.float32(scales), size // len(scales))

    hot = np.where(np.arange(size) // _ROW % 8 == 3, 1, 0.03).astype(np.float32)
    four = scaled(1, 0.1, 0.03, 0.01)
    return {
        "equal rows": [white],
        "four regions": [four],
        "four regions, leaves": np.split(four, 4, axis=1),
        "two regions": [scaled(1, 0.03)],
        "every 8th row large": [white * hot],
        "embedding by Zipf": [embedding(size, workers, seed)],
        "language model": [joined(language_model(size, workers, seed, layers=30), size)],
        "language model, leaves": language_model(size, workers, seed, layers=6),
    }


def embedding(size: int, workers: int, seed: int, width: int = 64) -> NDArray[np.float32]:
    """Draw the gradient of an embedding whose tokens are sorted by their frequency.

    The norm of a row falls with the root of its rank, as a sum of independent gradients of as many
    tokens as Zipf's law gives it.
    """
    white = worker_gradients(workers, size, seed + 1, octaves=0.0)
    ranks = 1 + np.arange(size // width)
    return white * np.repeat((1 / np.sqrt(ranks)).astype(np.float32), width)


def language_model(size: int, workers: int, seed: int, *, layers: int) -> Tree:
    """Draw gradients of the shapes of SmolLM2-135M, of a twelfth of its width.

    It has an embedding and 30 layers of seven matrices, with 3 heads of keys and values beside 9 of
    queries. The embedding takes what the layers leave of the coordinates.
    """
    width, hidden, heads = 48, 128, 16  # 576, 1536 and 3 x 64
    wide, narrow = (width, width), (width, heads)
    matrices = [wide, narrow, narrow, wide, (width, hidden), (width, hidden), (hidden, width)]
    shapes = [shape for _ in range(layers) for shape in matrices]
    tokens = max(8, (size - sum(a * b for a, b in shapes)) // width // 8 * 8)
    random = np.random.default_rng([seed, 2])
    leaves = [embedding(tokens * width, workers, seed, width).reshape(workers, tokens, width)]
    for number, shape in enumerate(shapes):
        own = worker_gradients(workers, shape[0] * shape[1], 3 + number, octaves=0.5)
        norm = 2.0 ** random.normal(-3 - number / 15, 1.0)
        leaves.append((np.float32(norm) * own).reshape(workers, *shape))
    return leaves


def joined(leaves: Tree, size: int) -> NDArray[np.float32]:
    """Join leaves to a vector of some size, [workers, size]."""
    flat = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)[:, :size]
    return np.pad(flat, ((0, 0), (0, size - flat.shape[1])))


def trained(config: Config) -> dict[str, Tree]:
    """Return gradients of two small language models, made once and kept in files."""
    workers = max(config.workers)
    recipe = tensors.Recipe(workers=workers, size=_TRAINED_SIZE, steps=(100,))
    folder = tensors.make(recipe, config.folder, _TRAINED)
    return {name: [tensors.load(folder, name, workers)[:, : config.size]] for name in _TRAINED}


# ------------------------------------------------------------------------------------------- errors


def functions(bits: float, topology: str, seed: int) -> dict[str, Function]:
    """Return the jitted functions that are compared; each takes a tree of all workers."""
    key = jax.random.key(seed)
    arguments: dict[str, Any] = {
        "topology": topology,
        "options": dq.Compression(bucket_bytes=_ONE_BUCKET),
    }
    arguments["method"] = dq.DynamiQ(bits=bits, rounding="correlated")

    def pmean(tree: Any) -> Any:
        return dq.pmean(tree, _AXIS, key=key, **arguments)

    def pipelined(tree: Any) -> Any:
        step = Pipelined(optimizer=optax.sgd(1.0), axis_name=_AXIS, seed=seed, **arguments)
        start = step.gather(step.init(jax.tree.map(jnp.zeros_like, tree)))
        return jax.tree.map(jnp.negative, step.gather(step.scatter(tree, start)).params)

    def psum_scatter(tree: Any) -> Any:
        return dq.psum_scatter(tree, _AXIS, key=key, tiled=True, **arguments)

    mapped = {"pmean": pmean, "pipelined": pipelined, "psum_scatter": psum_scatter}
    return {name: jax.jit(jax.vmap(one, axis_name=_AXIS)) for name, one in mapped.items()}


def measure(measures: dict[str, Function], tree: Tree) -> dict[str, float]:
    """Return the vNMSE of every function."""
    found = {}
    for name, function in measures.items():
        results = function(tree)
        squares, norms = 0.0, 0.0
        for leaf, result in zip(tree, results, strict=True):
            truth = leaf.sum(0, np.float64)
            whole = result.reshape(truth.shape) if name == "psum_scatter" else result[0] * len(leaf)
            squares += float(np.sum((np.asarray(whole, np.float64) - truth) ** 2))
            norms += float(np.sum(truth**2))
        found[name] = squares / norms
    return found


if __name__ == "__main__":
    run(main, __doc__)
