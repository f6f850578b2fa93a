"""Every method, topology and collective of the product, compiled as users compile: with all
optimizations of XLA, for a mesh of devices.

Most files compile without them, to save time (see `tests/support/speed.py`). This one always has
them. It takes pairs, so that each method, each topology and each collective is in at least one.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._buckets import order
from dynamiq_jax.methods import METHODS, ErrorFeedback
from dynamiq_jax.methods._registry import PRESETS
from dynamiq_jax.topologies import TOPOLOGIES, Ring
from tests.support import speed
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import Collective, collectives
from tests.support.workers import Largest, first

pytestmark = pytest.mark.optimized

NUM_WORKERS, SHAPE, BIAS = 4, (83, 251), 40  # divides by nothing
KEY = jax.random.key(0)
METHODS_OF_PRODUCT = (
    *("dynamiq", "paper", "exact", "bf16", "blockint", "qgz", "equarx"),
    *("mxfp8", "mxfp6", "mxfp4", "mxint8"),
)


class Case(NamedTuple):
    """One collective with one method on one topology, and the bounds of its vNMSE."""

    collective: str
    method: str  # and the topology, if it is no ring
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.collective}-{self.method}"


CASES = (
    # The default method in every collective and on every topology.
    Case("psum", "dynamiq", 9e-4, 1.5e-3),
    Case("pmean", "dynamiq", 9e-4, 1.5e-3),
    Case("psum_scatter", "dynamiq", 8e-4, 1.4e-3),
    Case("all_gather", "dynamiq:all_to_all", 3.3e-4, 5.6e-4),
    Case("all_reduce_gradients", "dynamiq:butterfly", 7e-4, 1.3e-3),
    Case("compress", "dynamiq:ring:unroll=True", 9e-4, 1.5e-3),
    Case("compress", "dynamiq:all_to_all", 7e-4, 1.2e-3),
    # Every other method.
    Case("psum", "paper", 2.8e-3, 4.5e-3),
    Case("psum", "exact:butterfly", 1e-17, 1e-14),
    Case("compress", "bf16:all_to_all", 2.8e-6, 4.5e-6),
    Case("pmean", "blockint", 7e-5, 1.2e-4),
    Case("compress", "qgz:all_to_all", 0.03, 0.05),
    Case("psum", "equarx:ring:unroll=True", 1.4e-4, 2.3e-4),
    Case("psum_scatter", "mxfp8", 8e-4, 1.3e-3),
    Case("all_gather", "mxint8:all_to_all", 8e-5, 1.3e-4),
    Case("pmean", "mxfp6:ring:unroll=True", 1.4e-3, 2.3e-3),
    Case("compress", "mxfp4:butterfly", 0.017, 0.028),
    Case("pmean", "mxint8:all_to_all", 1e-4, 1.7e-4),
    # Methods with state.
    Case("all_reduce_gradients", "ef+mxfp4:butterfly", 0.023, 0.037),
    Case("all_reduce_gradients", "ef+bf16", 5e-6, 9e-6),
)


def parts(method: str) -> set[str]:
    """`ef` and `bf16` of `ef+bf16:...`."""
    return set(method.partition(":")[0].split("+"))


@functools.cache
def gradients() -> dict[str, np.ndarray]:
    """One gradient for each worker: a leaf that is compressed, and one that is too small for it."""
    flat = of_workers(1, NUM_WORKERS, int(np.prod(SHAPE)))
    bias = of_workers(2, NUM_WORKERS, BIAS)
    return {"w": flat.reshape(NUM_WORKERS, *SHAPE), "bias": bias}


# ----------------------------------------------------------- programs of (key, stacked gradients)

Program = Callable[..., Any]


def on_workers(mesh: Mesh, local: Program, out: Any = P()) -> Program:
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=out))


def reduced(function: Program, mesh: Mesh, **arguments: Any) -> Program:
    return on_workers(mesh, lambda key, rows: function(first(rows), "data", key=key, **arguments))


def scattered(mesh: Mesh, **arguments: Any) -> Program:
    """The leaf that is compressed as a vector, of which each worker keeps a part."""

    def local(key: jax.Array, rows: Any) -> Any:
        flat = jnp.pad(rows["w"].reshape(-1), (0, -rows["w"].size % NUM_WORKERS))
        return {"w": dq.psum_scatter(flat, "data", key=key, tiled=True, **arguments)}

    return on_workers(mesh, local, P("data"))


def gathered(mesh: Mesh, **arguments: Any) -> Program:
    """The gradients of all workers, side by side on each of them."""

    def local(key: jax.Array, rows: Any) -> Any:
        how = {"key": key, "tiled": True, "to": "invarying", **arguments}
        return {"w": dq.all_gather(rows["w"], "data", **how)}

    return on_workers(mesh, local)


def updated(mesh: Mesh, **arguments: Any) -> Program:
    reduce = dq.all_reduce_gradients("data", **arguments)

    def local(key: jax.Array, rows: Any) -> Any:
        updates, state = reduce.update(first(rows), reduce.init(first(rows)))
        return updates, jax.tree.map(lambda leaf: leaf[None], state.method)

    both = on_workers(mesh, local, (P(), P("data")))
    return jax.jit(lambda key, rows: both(key, rows)[0])


def compressed(mesh: Mesh, **arguments: Any) -> Program:
    exact = on_workers(mesh, lambda key, rows: jax.lax.pmean(first(rows), "data"))
    rules = {"key": lambda key, rows: key, "only": lambda each: True}
    return jax.jit(dq.compress(exact, "data", **rules, **arguments))


PROGRAMS: dict[str, Program] = {
    "psum": functools.partial(reduced, dq.psum),
    "pmean": functools.partial(reduced, dq.pmean),
    "psum_scatter": scattered,
    "all_gather": gathered,
    "all_reduce_gradients": updated,
    "compress": compressed,
}


# --------------------------------------------------------------------------------------- the laws


HALVES = ("psum_scatter", "all_gather")


def sent_bytes(found: list[Collective], case: Case) -> float:
    """Bytes of each worker. Some rings have their last step outside of the loop."""
    trips = NUM_WORKERS - (2 if case.collective == "psum_scatter" else 1)
    once = [dataclasses.replace(c, looped=False).sent_bytes(NUM_WORKERS) for c in found]
    return sum(s * (trips if c.looped else 1) for s, c in zip(once, found, strict=True))


def reported_bytes(case: Case) -> float:
    """Bytes that `dq.wire_report` counts, and those that are beside the gradients."""
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), gradients())
    if case.collective == "psum_scatter":
        del tree["bias"]
    if case.collective == "all_gather":  # half of an all-reduce of what comes out
        tree = {"w": jax.ShapeDtypeStruct(gradients()["w"].shape, jnp.float32)}
    report = dq.wire_report(tree, NUM_WORKERS, method=case.method)
    assert report.compressed_bytes > 0
    if case.collective in HALVES:
        return report.compressed_bytes / 2
    return report.bytes_per_worker


def truth_of(case: Case, name: str) -> np.ndarray:
    rows = gradients()[name].astype(np.float64)
    if case.collective == "all_gather":
        return rows.reshape(-1, *rows.shape[2:])
    is_sum = case.collective in ("psum", "psum_scatter")
    return rows.sum(axis=0) if is_sum else rows.mean(axis=0)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_error_and_bytes(data_mesh, case):
    """One compiled program: the same bits on all workers, as far from the exact result as the
    method is and no farther or closer, and the bytes of the report.
    """
    mesh = data_mesh(NUM_WORKERS)
    rows = jax.device_put(gradients(), NamedSharding(mesh, P("data")))
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    compiled = PROGRAMS[case.collective](mesh, method=case.method).lower(key, rows).compile()
    result, found = compiled(key, rows), collectives(compiled.as_text())

    whole = case.collective != "psum_scatter"
    for leaf in jax.tree.leaves(result):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == NUM_WORKERS
        assert len(copies) == (1 if whole else NUM_WORKERS)
    truth = truth_of(case, "w")
    # A scattered vector is padded.
    value = np.asarray(result["w"]).reshape(-1)[: truth.size].reshape(truth.shape)
    assert case.least < vnmse(value, truth) < case.most
    if "bias" in result:
        assert vnmse(result["bias"], truth_of(case, "bias")) < 1e-12

    # A half of an all-reduce has either more or less than half of the statistics.
    has_statistics = case.collective in HALVES and parts(case.method) == {"dynamiq"}
    expected = reported_bytes(case)
    assert sent_bytes(found, case) == pytest.approx(expected, rel=0.03 if has_statistics else 1e-9)


@pytest.mark.parametrize(
    ("method", "least", "most"),
    ((ErrorFeedback(inner=Largest()), 0.15, 0.28), ("ef+bf16", 2e-6, 6e-6)),
)
def test_error_feedback_makes_up_for_what_a_step_left_out(data_mesh, method, least, most):
    """The mean of two steps with the same gradient is closer to it than that of either."""
    reduce = dq.all_reduce_gradients("data", method=method)

    def local(key: jax.Array, rows: Any) -> Any:
        one, state = reduce.update(first(rows), reduce.init(first(rows)))
        other, _ = reduce.update(first(rows), state)
        return one["w"], other["w"]

    steps = on_workers(data_mesh(NUM_WORKERS), local)(KEY, gradients())
    one, other = map(np.asarray, steps)
    truth = gradients()["w"].mean(axis=0, dtype=np.float64)
    error = vnmse((one + other) / 2, truth)
    assert least < error < most
    assert error < 0.95 * min(vnmse(one, truth), vnmse(other, truth))


# ------------------------------------------------------------------------------------ completeness


def test_this_file_compiles_as_users_do():
    assert jax.config.read("jax_disable_most_optimizations") is False
    assert os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
    flags = os.environ["XLA_FLAGS"].split()
    assert not [flag for flag in flags if flag in speed.QUICK]


def test_every_method_of_the_product_is_here():
    assert {*METHODS.own, *PRESETS} == set(METHODS_OF_PRODUCT)
    tried = set().union(*(parts(case.method) for case in CASES))
    assert tried == {*METHODS_OF_PRODUCT, "ef"}


def test_every_topology_and_option_of_a_ring_is_here():
    tried = {dq.Compression(case.method).topology for case in CASES}
    assert {type(topology) for topology in tried} == set(TOPOLOGIES.values())
    assert tried >= {Ring(), Ring(unroll=True)}


def test_every_collective_is_here():
    collective = {
        name
        for name in dq.__all__
        if inspect.isfunction(getattr(dq, name))
        and {"axis_name", "method"} <= inspect.signature(getattr(dq, name)).parameters.keys()
    }
    assert PROGRAMS.keys() == collective == {case.collective for case in CASES}


def test_a_token_is_computed_once_for_all_that_wait():
    """XLA copies what is cheap into all that use it: compile times would grow with the square."""

    def step(*values):
        token = order.token_of(values)
        return [order.after(token, jnp.sin(value)) for value in values]

    values = [jnp.full(64, number, jnp.float32) for number in range(32)]
    compiled = jax.jit(step).lower(*values).compile()
    np.testing.assert_array_equal(compiled(*values), jnp.sin(jnp.stack(values)))
    shifts = compiled.as_text().count(" shift-right-logical(")
    assert len(values) < shifts <= 3 * len(values)
