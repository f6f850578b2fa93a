"""One process of test_agreement.py, and pairs of collectives that differ in one thing."""

import contextlib
import functools
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import training
from dynamiq_jax._check import exchange
from tests.support.workers import mesh_of

SIZE = 4096
LONG = 90.0  # seconds to wait for processes that do come, on a busy machine


def worker() -> jax.Array:
    return jax.lax.axis_index("data").astype(jnp.float32)


def tree_of(name: str) -> dict[str, jax.Array]:
    """Values of this worker: the name makes the collective a new one."""
    return {name: jnp.arange(float(SIZE)).reshape(16, -1) * worker()}


def mean(name: str, *, key: int | jax.Array = 0, **arguments: Any) -> Any:
    key = jax.random.key(key) if isinstance(key, int) else key
    return dq.pmean(tree_of(name), "data", key=key, **arguments)


def on_mesh(function: Callable[[], Any], mesh: jax.sharding.Mesh | None = None) -> Any:
    mesh = mesh or mesh_of(data=jax.device_count())
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


@contextlib.contextmanager
def flags_of_xla(value: str):
    with unittest.mock.patch.dict("os.environ", {"XLA_FLAGS": value}):
        yield


def reduce_gradients(name: str, **arguments: Any) -> Any:
    reduction = dq.all_reduce_gradients("data", **arguments)
    return reduction.update(tree_of(name), reduction.init(tree_of(name)))[0]


def local_sgd(name: str, **fields: Any) -> Any:
    step = training.LocalSGD(axis_name="data", **{"every": 1, **fields})
    params = {name: jnp.ones((16, 256))}
    return step.update(params, step.init(params), due=step.due(0))[0]


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ jax.tree.leaves(params)[0]) ** 2)


def compressed(name: str, mesh: jax.sharding.Mesh | None = None, **arguments: Any) -> Any:
    """Jit a compressed step with shardings alone, of all devices or of a mesh."""
    mesh = mesh or mesh_of(data=jax.device_count())
    in_specs = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = dq.compress(jax.grad(loss_fn), "data", in_specs=in_specs, **arguments)
    params, x = {name: np.ones((64, 64), np.float32)}, np.ones((8, 64), np.float32)
    return jax.jit(functools.partial(step, params, x))


# Traces of the collective of one process and of that of the others, both functions of the name of
# the case; and what differs: its name, the value of the one, and that of the others.
Case = tuple[Callable[[str], Any], Callable[[str], Any], tuple[str, ...]]


def case(function: Callable[..., Any], a: Any, b: Any, *words: str) -> Case:
    def with_fields(fields: Any) -> Callable[[str], Any]:
        return lambda name: on_mesh(lambda: function(name, **fields)).trace()

    return with_fields(a), with_fields(b), words


def within(a: Any, b: Any, *words: str) -> Case:
    """A mean that is traced in two contexts."""

    def inside(context: Any) -> Callable[[str], Any]:
        def trace(name: str) -> None:
            with context():
                on_mesh(lambda: mean(name)).trace()

        return trace

    return inside(a), inside(b), words


def methods(a: Any, b: Any, *words: str, function: Callable[..., Any] = mean) -> Case:
    return case(function, {"method": a}, {"method": b}, *words)


def steps(a: Callable[[str], Any], b: Callable[[str], Any], *words: str) -> Case:
    """Two functions of a name, which are traced on a mesh."""
    return case(lambda name, run: run(name), {"run": a}, {"run": b}, *words)


def pmean(tree: Any) -> Any:
    return dq.pmean(tree, "data", key=jax.random.key(0))


def other_shapes(name: str) -> dict[str, jax.Array]:
    return {name: jnp.ones((8, 512)) * worker()}


def of_half(half: Any) -> Callable[[str], Any]:
    return lambda name: half(tree_of(name), "data", key=jax.random.key(0), tiled=True)


DISAGREEING: dict[str, Case] = {
    "method": methods("dynamiq", "mxfp8", "method", "DynamiQ", "MXFP8"),
    "bits": methods("dynamiq:5", "dynamiq:4", "method.bits", "5", "4"),
    "rounding": methods(
        *("dynamiq:rounding=correlated", "dynamiq:rounding=independent"),
        *("method.rounding", "correlated", "independent"),
    ),
    "method of a leaf": methods(
        {".*": "dynamiq"}, {".*": "blockint"}, "method", "DynamiQ", "BlockInt"
    ),
    "inner method": methods(
        *("ef+dynamiq:5", "ef+dynamiq:6", "method.inner.bits", "5", "6"), function=reduce_gradients
    ),
    "topology": methods("mxfp8:ring", "mxfp8:all_to_all", "topology", "Ring", "AllToAll"),
    "loop": methods("mxfp8:ring", "mxfp8:ring:unroll=True", "topology.unroll", "False", "True"),
    "options": methods(
        *(dq.Compression(bucket_bytes=2**20), dq.Compression(bucket_bytes=2**21)),
        *("compression.bucket_bytes", "1048576", "2097152"),
    ),
    "limit": methods(
        dq.Compression(max_error=0.1), "dynamiq", "compression.max_error", "0.1", "None"
    ),
    "shapes": steps(
        mean,
        lambda name: pmean(other_shapes(name)),
        *("leaf 0", "tree['shapes'] of float32[16, 256]", "tree['shapes'] of float32[8, 512]"),
    ),
    "more leaves": steps(
        mean,
        lambda name: pmean(tree_of(name) | tree_of("more leaves and one")),
        *("number of leaves", "1", "2"),
    ),
    "names of leaves": steps(
        mean,
        lambda name: mean("another"),
        *("leaf 0", "tree['names of leaves'] of float32[16, 256]"),
        "tree['another'] of float32[16, 256]",
    ),
    "collective": steps(
        mean,
        lambda name: dq.psum(tree_of(name), "data", key=jax.random.key(0)),
        *("mean", "True", "False"),
    ),
    "halves": steps(
        of_half(dq.psum_scatter),
        of_half(dq.all_gather),
        *("collective", "ReduceScatter", "AllGather"),
    ),
    "implementation of keys": steps(
        lambda name: mean(name, key=jax.random.key(0, impl="rbg")),
        mean,
        *("implementation of the key", "rbg", "threefry2x32"),
    ),
    "seed": case(reduce_gradients, {"seed": 1}, {"seed": 2}, "seed", "1", "2"),
    "phases": methods(
        *(dq.Schedule({0: "exact", start: "mxfp8"}) for start in (10, 20)),
        *("phases", "(0, 10)", "(0, 20)"),
        function=reduce_gradients,
    ),
    "flags of XLA": within(
        lambda: flags_of_xla("--xla_allow_excess_precision=false --xla_dump_max_hlo_modules=1"),
        lambda: flags_of_xla("--xla_dump_max_hlo_modules=2"),
        *("XLA_FLAGS", "['--xla_allow_excess_precision=false']", "[]"),
    ),
    "random bits": within(
        lambda: jax.threefry_partitionable(True),
        lambda: jax.threefry_partitionable(False),
        *("jax_threefry_partitionable", "True", "False"),
    ),
    "precision": within(
        lambda: jax.default_matmul_precision("highest"),
        contextlib.nullcontext,
        *("jax_default_matmul_precision", "highest", "None"),
    ),
    "local steps": case(local_sgd, {"every": 1}, {"every": 2}, "every", "1", "2"),
    "seed of local steps": case(local_sgd, {"seed": 1}, {"seed": 2}, "seed", "1", "2"),
    "compressed step": (
        lambda name: compressed(name, method="mxfp8").trace(),
        lambda name: compressed(name, method="mxint8").trace(),
        ("method", "MXFP8", "MXINT8"),
    ),
}


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            jax.block_until_ready(function())
            error = None
        except RuntimeError as raised:
            error = str(raised)
    return {"error": error, "warnings": [str(each.message) for each in caught]}


def outcomes(rank: int) -> dict[str, Any]:
    """Run a mean that is the same in all processes, one that is not, and then one that is."""
    exchange.PATIENCE = exchange.SHORT_PATIENCE = LONG
    found: dict[str, Any] = {}
    compare, compared = exchange._Group._compare, list[Any]()

    def counted(self, *arguments):
        compared.append(arguments)
        return compare(self, *arguments)

    def program(name: str, method: Any) -> Any:
        return on_mesh(lambda: mean(name, method=method))

    with unittest.mock.patch.object(exchange._Group, "_compare", counted):
        same = program("the same", "mxfp8")
        unchecked = program("the same", dq.Compression("mxfp8", check_agreement=False))
        found["is free"] = same.lower().as_text() == unchecked.lower().as_text()
        found["the same"] = outcome(same)
        for _ in range(3):
            same()
        program("the same", "mxfp8")()
        found["exchanges"] = len(compared)
    found["another"] = outcome(program("another", "mxfp8" if rank else "mxfp4"))
    found["corrected"] = outcome(program("another", "mxfp4"))
    return found
