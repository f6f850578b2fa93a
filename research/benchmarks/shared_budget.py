"""Error of buckets with budgets of their own, against one bucket that shares its bits among all.

    python -m research.benchmarks.shared_budget

Every form sends the same bytes. The trees are four leaves of very different scales, each in a
bucket of its own, and gradients with the shapes of SmolLM2-135M, whose layers and vocabulary are
reduced by the same factor. `FORMS` lists the forms.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray
from rich.progress import track

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement.devices import AXIS, make_mesh
from dynamiq_jax._measurement.simulate import make_devices
from dynamiq_jax.methods import Method
from dynamiq_research import allocate_bits

Tree = Any  # of arrays [workers, *shape]
Form = Callable[[Tree, int, float, int], tuple[Any, dq.Compression]]

_WIDTH, _MLP, _HEADS, _SHARED_HEADS = 576, 1536, 9, 3  # of SmolLM2-135M
_LAYERS, _VOCABULARY = 30, 49152
_SHARES = {"embedding": 0.18, "attention": 0.47, "mlp": 0.35}  # of the energy
_ROW = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    bits: tuple[float, ...] = (3.0, 4.0, 5.0, 6.0)  # on the wire
    workers: tuple[int, ...] = (2, 4, 8)
    leaf_size: int = 2**20  # coordinates of each of four leaves
    reduced: int = 10  # divides layers, vocabulary and the larger bucket of the language model
    octaves: float = 1.5  # spread of the magnitudes of rows of 256
    agreement: float = 0.5  # share of the energy that workers have in common
    trees: tuple[str, ...] = ()  # names of trees; all if none is given
    save: bool = True  # write the result to research/benchmarks/results/shared_budget.json


@dataclasses.dataclass(frozen=True)
class Case:
    """Gradients, and the size of buckets."""

    name: str
    shapes: Any  # tree of shapes of leaves
    energy: Callable[[str, int, np.random.Generator], NDArray]  # path, size: of each coordinate
    bucket_bytes: int


# ----------------------------------------------------------------------------------------- forms


def joint(
    tree: Tree, workers: int, bits: float, bucket_bytes: int
) -> tuple[Method, dq.Compression]:
    """Return the method and options of one bucket for everything."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) // workers
    return dq.DynamiQ(bits=bits), dq.Compression(bucket_bytes=size)


def in_order(
    tree: Tree, workers: int, bits: float, bucket_bytes: int
) -> tuple[Method, dq.Compression]:
    """Return the method and options of buckets of the same bits."""
    return dq.DynamiQ(bits=bits), dq.Compression(bucket_bytes=bucket_bytes, bucketing="in_order")


def striped(
    tree: Tree, workers: int, bits: float, bucket_bytes: int
) -> tuple[Method, dq.Compression]:
    """Return the method and options of buckets with a like share of every leaf."""
    return dq.DynamiQ(bits=bits), dq.Compression(bucket_bytes=bucket_bytes, bucketing="striped")


def allocated(
    tree: Tree, workers: int, bits: float, bucket_bytes: int
) -> tuple[Any, dq.Compression]:
    """Return the policy of the gradients of one worker, and options."""
    method, options = in_order(tree, workers, bits, bucket_bytes)
    of_one = jax.tree.map(lambda leaf: leaf[0], tree)
    allocation = allocate_bits(
        of_one, axis_size=workers, method=dataclasses.replace(options, method=method)
    )
    return allocation.policy, options


FORMS: dict[str, Form] = {
    "joint": joint,
    "striped": striped,
    "in order": in_order,
    "allocated": allocated,
}

# ----------------------------------------------------------------------------------------- trees


def cases(config: Config) -> list[Case]:
    """List the gradients of the benchmark."""
    leaves = dict.fromkeys("abcd", (config.leaf_size,))
    scales = dict(zip("abcd", (1.0, 0.1, 0.03, 0.01), strict=True))

    def spread(path: str, size: int, rng: np.random.Generator) -> NDArray:
        return scales[path] ** 2 * _lognormal(size, config.octaves, rng)

    def white(path: str, size: int, rng: np.random.Generator) -> NDArray:
        return np.full(size, scales[path] ** 2)

    reduced = config.reduced
    heads = {"q": _HEADS, "k": _SHARED_HEADS, "v": _SHARED_HEADS, "o": _HEADS}
    layer = {
        "attention": {name: (_WIDTH, _WIDTH * count // _HEADS) for name, count in heads.items()},
        "mlp": {"gate": (_WIDTH, _MLP), "up": (_WIDTH, _MLP), "down": (_MLP, _WIDTH)},
        "norm": (_WIDTH,),
    }
    model = {
        # A multiple of four tokens are whole rows of 256, as the whole vocabulary is.
        "embedding": (_VOCABULARY // reduced // 4 * 4, _WIDTH),
        "layers": [layer] * (_LAYERS // reduced),
    }
    sizes: dict[str, int] = {}
    for path, shape in _named(model):
        sizes[_kind(path)] = sizes.get(_kind(path), 0) + int(np.prod(shape))

    def language_model(path: str, size: int, rng: np.random.Generator) -> NDArray:
        kind = _kind(path)
        if kind == "embedding":  # frequencies of tokens follow Zipf's law
            tokens = 1 / (1 + rng.permutation(size // _WIDTH))
            energy = np.repeat(tokens, _WIDTH)
        else:
            energy = _lognormal(size, config.octaves, rng)
        return energy / energy.mean() * _SHARES.get(kind, 1e-3) / sizes[kind]

    known = [
        Case("four leaves", leaves, spread, 4 * config.leaf_size),
        Case("four leaves of white noise", leaves, white, 4 * config.leaf_size),
        Case("SmolLM2, 128 MiB", model, language_model, 2**27 // reduced),
        Case("SmolLM2, 4 MiB", model, language_model, 2**22),
    ]
    return [case for case in known if case.name in config.trees or not config.trees]


def draw(case: Case, workers: int, agreement: float) -> Tree:
    """Draw the gradients of all workers, float32 [workers, *shape]."""
    drawn = []
    for number, (path, shape) in enumerate(_named(case.shapes)):
        rng = np.random.default_rng([number, 0])
        size = int(np.prod(shape))
        scale = np.sqrt(case.energy(path, size, rng)).astype(np.float32)
        signal = np.float32(np.sqrt(agreement)) * rng.standard_normal(size, np.float32)
        own = [np.random.default_rng([number, 1 + worker]) for worker in range(workers)]
        noise = np.float32(np.sqrt(1 - agreement))
        values = [scale * (signal + noise * each.standard_normal(size, np.float32)) for each in own]
        drawn.append(np.stack(values).reshape(workers, *shape))
    structure = jax.tree.structure(case.shapes, is_leaf=_is_shape)
    return jax.tree.unflatten(structure, drawn)


def _named(shapes: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, shape in jax.tree_util.tree_leaves_with_path(shapes, is_leaf=_is_shape):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), shape


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def _kind(path: str) -> str:
    return next((kind for kind in _SHARES if kind in path), "norm")


def _lognormal(size: int, octaves: float, rng: np.random.Generator) -> NDArray:
    magnitudes = np.exp2(octaves * rng.standard_normal(-(-size // _ROW)))
    return np.repeat(magnitudes**2, _ROW)[:size]


# ------------------------------------------------------------------------------------- measuring


def vnmse(tree: Tree, truth: Tree, method: Any, options: dq.Compression) -> float:
    """Return the vNMSE of the mean, with every worker on a virtual device."""
    workers = len(jax.tree.leaves(tree)[0])
    mesh = make_mesh(jax.devices()[:workers])

    def local(tree: Tree) -> Tree:
        own = jax.tree.map(lambda leaf: leaf[0], tree)
        return dq.pmean(
            own, AXIS, key=jax.random.key(0), method=dataclasses.replace(options, method=method)
        )

    mean = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P()))
    on_devices = jax.device_put(tree, NamedSharding(mesh, P(AXIS)))
    error = norm = 0.0
    for mean_of_leaf, exact in zip(
        jax.tree.leaves(mean(on_devices)), jax.tree.leaves(truth), strict=True
    ):
        error += float(np.sum((np.asarray(mean_of_leaf) - exact) ** 2, dtype=np.float64))
        norm += float(np.sum(exact**2, dtype=np.float64))
    return error / norm


def over_joint(name: str) -> Callable[[dict[str, Any]], float]:
    """Return a function of a row: the error of a form relative to one joint bucket."""
    return lambda row: row[name]["vnmse"] / row["joint"]["vnmse"]


COLUMNS = (
    Column("tree", "tree"),
    Column("workers", "workers"),
    Column("bits", "bits", "{:g}"),
    Column("vNMSE, joint", lambda row: row["joint"]["vnmse"], "{:.1e}"),
    *(Column(name, over_joint(name), "{:.2f}") for name in list(FORMS)[1:]),
    Column("bytes", lambda row: row["allocated"]["bytes"] / row["in order"]["bytes"], "{:.2%}"),
    Column("buckets", ("allocated", "buckets")),
)


@benchmark("research/shared_budget")
def main(config: Config) -> Report:
    """Measure every form."""
    known = cases(dataclasses.replace(config, trees=()))
    if unknown := set(config.trees) - {case.name for case in known}:
        raise SystemExit(f"--trees: no {sorted(unknown)}. Give some of {[c.name for c in known]}.")
    make_devices(max(config.workers))
    work = [(case, workers) for case in cases(config) for workers in config.workers]
    rows = []
    for case, workers in track(work, "Measuring", transient=True):
        tree = draw(case, workers, config.agreement)
        truth = jax.tree.map(lambda leaf: leaf.mean(0, dtype=np.float64), tree)
        for bits in config.bits:
            row: dict[str, Any] = {"tree": case.name, "workers": workers, "bits": bits}
            for name, form in FORMS.items():
                method, options = form(tree, workers, bits, case.bucket_bytes)
                report = dq.wire_report(
                    jax.tree.map(lambda leaf: leaf[0], tree),
                    workers,
                    method=dataclasses.replace(options, method=method),
                )
                numbers = [number for leaf in report.leaves for number in leaf.buckets]
                row[name] = {
                    "vnmse": vnmse(tree, truth, method, options),
                    "bytes": report.bytes_per_worker,
                    "buckets": len(set(numbers)),
                    "methods": len({leaf.method for leaf in report.leaves} - {None}),
                }
            rows.append(row)
    return Report(results=rows, shown=[table("vNMSE over that of one joint bucket", COLUMNS, rows)])


if __name__ == "__main__":
    run(main, __doc__)
