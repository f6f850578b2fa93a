"""One process of test_agreement.py, and functions that trace collectives of a new name."""

import contextlib
import dataclasses
import functools
import threading
import time
import unittest.mock
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import training
from dynamiq_jax._check import exchange
from tests.support.hlo import collectives

SIZE = 4096
LONG = 90.0  # seconds to wait for processes that do come, on a busy machine
SHORT = 0.5  # seconds to wait, in cases of processes that do not come


def tree_of(name: str) -> dict[str, jax.Array]:
    """Values of this worker: the name makes the collective a new one."""
    return {name: jnp.arange(float(SIZE)).reshape(16, -1) * jax.lax.axis_index("data")}


def mean(name: str, *, key: int | jax.Array = 0, **arguments: Any) -> Any:
    key = jax.random.key(key) if isinstance(key, int) else key
    return dq.pmean(tree_of(name), "data", key=key, **arguments)


def on_mesh(function: Callable[[], Any], mesh: jax.sharding.Mesh | None = None) -> Any:
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def run_mean(name: str, **arguments: Any) -> None:
    jax.block_until_ready(on_mesh(lambda: mean(name, **arguments))())


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


@contextlib.contextmanager
def without_agreement():
    with unittest.mock.patch.object(exchange.Exchange, "agree", lambda *args, **how: None):
        yield


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ jax.tree.leaves(params)[0]) ** 2)


def compressed(name: str, mesh: jax.sharding.Mesh | None = None, **arguments: Any) -> Any:
    """Jit a compressed step with shardings alone, of all devices or of a mesh."""
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    in_specs = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = dq.compress(jax.grad(loss_fn), "data", in_specs=in_specs, **arguments)
    params, x = {name: np.ones((64, 64), np.float32)}, np.ones((8, 64), np.float32)
    return jax.jit(functools.partial(step, params, x))


# What one process runs, what the others run, both functions of the name of the case; and what
# differs: its name, the value of the one, and that of the others.
Case = tuple[Callable[[str], Any], Callable[[str], Any], tuple[str, ...]]


def case(function: Callable[..., Any], a: Any, b: Any, *words: str) -> Case:
    def with_fields(fields: Any) -> Callable[[str], Any]:
        return lambda name: on_mesh(lambda: function(name, **fields))()

    return with_fields(a), with_fields(b), words


def within(a: Any, b: Any, *words: str) -> Case:
    """A mean that is traced in two contexts."""

    def inside(context: Any) -> Callable[[str], Any]:
        def run(name: str) -> None:
            with context():
                run_mean(name)

        return run

    return inside(a), inside(b), words


def methods(a: Any, b: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"method": a}, {"method": b}


def steps(a: Callable[[str], Any], b: Callable[[str], Any], *words: str) -> Case:
    """Two functions of a name, which are traced on a mesh."""
    return case(lambda name, run: run(name), {"run": a}, {"run": b}, *words)


def pmean(tree: Any) -> Any:
    return dq.pmean(tree, "data", key=jax.random.key(0))


def other_shapes(name: str) -> dict[str, jax.Array]:
    return {name: jnp.ones((8, 512)) * jax.lax.axis_index("data")}


def of_half(half: Any) -> Callable[[str], Any]:
    return lambda name: half(tree_of(name), "data", key=jax.random.key(0), tiled=True)


DISAGREEING: dict[str, Case] = {
    "method": case(mean, *methods("dynamiq", "mxfp8"), "method", "DynamiQ", "MXFP8"),
    "bits": case(mean, *methods("dynamiq:5", "dynamiq:4"), "method.bits", "5", "4"),
    "rounding": case(
        mean,
        *methods("dynamiq:rounding=correlated", "dynamiq:rounding=independent"),
        *("method.rounding", "correlated", "independent"),
    ),
    "method of a leaf": case(
        mean, *methods({".*": "dynamiq"}, {".*": "blockint"}), "method", "DynamiQ", "BlockInt"
    ),
    "inner method": case(
        reduce_gradients, *methods("ef+dynamiq:5", "ef+dynamiq:6"), "method.inner.bits", "5", "6"
    ),
    "topology": case(
        mean, *methods("mxfp8:ring", "mxfp8:all_to_all"), "topology", "Ring", "AllToAll"
    ),
    "loop": case(
        mean,
        *methods("mxfp8:ring", dq.Compression("mxfp8", "ring:unroll=True")),
        *("topology.unroll", "False", "True"),
    ),
    "options": case(
        mean,
        *methods(dq.Compression(bucket_bytes=2**20), dq.Compression(bucket_bytes=2**21)),
        *("compression.bucket_bytes", "1048576", "2097152"),
    ),
    "limit": case(
        mean,
        *methods(dq.Compression(max_error=0.1), dq.Compression()),
        *("compression.max_error", "0.1", "None"),
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
        "leaf 0",
        "tree['names of leaves'] of float32[16, 256]",
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
    "phases": case(
        reduce_gradients,
        *methods(*(dq.Schedule({0: "exact", start: "mxfp8"}) for start in (10, 20))),
        *("phases", "(0, 10)", "(0, 20)"),
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
        lambda name: compressed(name, method="mxfp8")(),
        lambda name: compressed(name, method="mxint8")(),
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


def special(rank: int, number: int) -> dict[str, Any]:
    """Cases in which processes agree, come late, or are not all of the job."""
    found: dict[str, Any] = {}
    compare, compared = exchange._Group._compare, list[Any]()

    def counted(self, *arguments):
        compared.append(arguments)
        return compare(self, *arguments)

    def both(name: str) -> list[Any]:
        return [
            on_mesh(
                functools.partial(mean, name, method=dataclasses.replace(arguments, method="mxfp8"))
            )
            for arguments in (dq.Compression(check_agreement=False), dq.Compression())
        ]

    with unittest.mock.patch.object(exchange._Group, "_compare", counted):
        without, checked = both("the same")
        texts = [step.lower().compile().as_text() for step in (without, checked)]
        found["bytes"] = [sum(each.sent_bytes(number) for each in collectives(t)) for t in texts]
        report = dq.wire_report(
            {"the same": jnp.zeros((16, SIZE // 16))}, axis_size=number, method="mxfp8"
        )
        found["reported"] = report.bytes_per_worker
        found["agreed"] = outcome(checked)
        for _ in range(3):
            checked()
        on_mesh(lambda: mean("the same", method="mxfp8"))()
        found["exchanges"] = len(compared)
    if rank:  # after a difference, as after others, the same call is compared anew
        found["again"] = outcome(lambda: run_mean("again", method="mxfp8"))
        found["corrected"] = outcome(lambda: run_mean("again", method="mxfp4"))
    else:
        found["again"] = outcome(lambda: run_mean("again", method="mxfp4"))
        found["corrected"] = outcome(lambda: run_mean("again", method="mxfp4"))
    # Only process 0 inspects: it must not wait, and the step is compared when it runs.
    step = on_mesh(lambda: mean("inspected", method="dynamiq" if rank else "mxfp4"))
    if rank == 0:
        found["inspection"] = outcome(lambda: dq.inspect(step).rows and None)
    found["after inspection"] = outcome(step)
    # A process alone, and the first two.
    alone = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    found["alone"] = outcome(
        on_mesh(lambda: mean("alone", method="mxfp4" if rank else "exact"), alone)
    )
    first = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    if rank < 2:
        with jax.set_mesh(first):
            mapped = jax.shard_map(
                lambda: mean("two", method="mxfp8" if rank else "mxfp4"),
                in_specs=(),
                out_specs=P(),
                check_vma=False,
            )
            found["two"] = outcome(jax.jit(mapped))
    found["threads"] = in_threads(rank)
    with unittest.mock.patch.object(exchange, "PATIENCE", SHORT):
        if rank == 0:  # for a log
            lone = on_mesh(lambda: mean("lone", method="bf16"))
            found["lone"] = outcome(lambda: lone.lower() and None)
    jax.block_until_ready(checked())  # the others wait here
    found["after lone"] = outcome(lambda: run_mean("after lone", method="bf16"))
    with unittest.mock.patch.multiple(exchange, PATIENCE=SHORT, SHORT_PATIENCE=SHORT, DOUBT=SHORT):
        if rank == 1:
            time.sleep(3 * SHORT)
        found["late"] = outcome(lambda: run_mean("late", method="bf16"))
        if rank == 1:
            time.sleep(3 * SHORT)
        method = "mxfp8" if rank == 1 else "mxfp4"
        late = on_mesh(lambda: mean("late and different", method=method))
        found["late and different"] = outcome(lambda: late.lower() and None)
    return found


def in_threads(rank: int) -> list[str | None]:
    """Trace two steps in two threads, in another order in each process: errors."""
    errors: list[str | None] = [None, None]

    def trace(number: int) -> None:
        errors[number] = outcome(
            lambda: on_mesh(lambda: mean(f"thread {number}", method="bf16")).lower() and None
        )["error"]

    numbers = (1, 0) if rank else (0, 1)
    threads = [threading.Thread(target=trace, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
        time.sleep(SHORT)  # the first one waits when the second one begins
    for thread in threads:
        thread.join()
    return errors


def outcomes(rank: int, number: int, names: Sequence[str]) -> dict[str, Any]:
    """Run some of the cases of `DISAGREEING` and all special ones, each a collective that this
    process has not traced before: the error, or the warnings, of each.
    """
    return differing(rank, number, {name: DISAGREEING[name] for name in names}) | special(
        rank, number
    )


def differing(rank: int, number: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Run cases in which the last process runs another collective than all others."""
    exchange.PATIENCE = exchange.SHORT_PATIENCE = LONG
    differs = rank == number - 1
    return {
        name: outcome(functools.partial(one if differs else others, name))
        for name, (one, others, _) in cases.items()
    }
