"""Laws of every topology and collective on a mesh: the bits of the simulation, and the bytes of the
report. `test_methods.py` has every method.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import dynamiq_jax as dq
from dynamiq_jax.methods import Method
from tests.support.gradients import of_workers
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC, TWO_WIDTHS, call_on, mesh_program

KEY = jax.random.key(0)
TREE = {"kernel": (40, 256), "embedding": (14, 340), "bias": (40,)}  # divides by nothing
VECTOR = {"w": (20_000,)}
HALF = {"w": (96, 256)}
Local = Callable[[jax.Array, Any], Any]


def summing(method: Any, topology: Any = "ring", axes: Any = "data", by: Any = dq.psum) -> Local:
    return lambda key, tree: by(tree, axes, dq.Compression(method, topology), key=key)


def measuring(how: dq.Compression) -> Local:
    """Return a mean, and metrics of it."""

    def local(key: jax.Array, tree: Any) -> Any:
        mean, metrics = dq.pmean(tree, "data", how, key=key, with_metrics=True)
        return mean | {name: metrics[name] for name in ("bytes", "error")}

    return local


def scattering(method: Method, topology: str) -> Local:
    return lambda key, tree: dq.psum_scatter(
        tree, "data", key=key, tiled=True, method=dq.Compression(method, topology)
    )


def gathering(method: Method) -> Local:
    return lambda key, tree: dq.all_gather(tree, "data", key=key, tiled=True, method=method)


def shapes_of(tree: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in tree.items()}


def report_of(
    method: Any, topology: Any = "ring", *, workers: Any = 4, tree: Any = None, **options: Any
) -> dq.reports.WireReport:
    how = dq.Compression(method, topology)
    return dq.wire_report(shapes_of(tree or VECTOR), workers, how, **options)


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective on one mesh, and the bytes of its slow and of its fast axis."""

    local: Local
    sent: float
    fast: float = 0
    workers: tuple[int, ...] = (4,)
    tree: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: VECTOR)
    check_vma: bool = True
    replicated: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        return ("data",) if len(self.workers) == 1 else ("hosts", "local")


def case_of(local: Local, report: dq.reports.WireReport, **fields: Any) -> Case:
    return Case(local, report.bytes_per_worker, report.fast_bytes, **fields)


def topology_case(topology: str, method: Method = STOCHASTIC, **fields: Any) -> Case:
    return case_of(summing(method, topology), report_of(method, topology), **fields)


def tree_case(workers: int, method: Any = STOCHASTIC, **fields: Any) -> Case:
    report = report_of(method, workers=workers, tree=TREE)
    return case_of(summing(method), report, workers=(workers,), tree=TREE, **fields)


def hosts_case(topology: str, **fields: Any) -> Case:
    report = report_of(STOCHASTIC, topology, workers=(2, 4))
    local = summing(STOCHASTIC, topology, ("hosts", "local"))
    return case_of(local, report, workers=(2, 4), **fields)


def half_of(method: Method, collective: str, topology: str, parts: int) -> int:
    call = call_on(parts * int(np.prod(HALF["w"])), 4, topology, collective=collective)
    cost = method.wire_cost(call)
    return cost.statistics_bytes + 3 * cost.payload_bytes


def scatter_case(method: Method, topology: str, **fields: Any) -> Case:
    sent = half_of(method, "psum_scatter", topology, 1)
    return Case(scattering(method, topology), sent, tree=HALF, replicated=False, **fields)


def striped_case(stripe: int) -> Case:
    """A loop over three stripes, as long as that of a ring of four workers."""
    tree = {"a": (2 * stripe - 5,), "b": (40_000,)}
    how = dq.Compression(
        STOCHASTIC, "ring:unroll=True", bucket_bytes=4 * stripe, bucketing="striped"
    )
    report = dq.wire_report(shapes_of(tree), 4, how, with_metrics=True)
    assert [leaf.buckets for leaf in report.leaves] == [(0, 1, 2)] * 2
    return case_of(measuring(how), report, tree=tree)


CASES = {
    "ring": topology_case("ring"),
    "unrolled": topology_case("ring:unroll=True"),
    "butterfly": topology_case("butterfly", check_vma=False),
    "all to all": topology_case("all_to_all", TWO_WIDTHS),
    "all to all unchecked": topology_case("all_to_all", check_vma=False),
    "one worker": tree_case(1),
    "three workers unchecked": tree_case(3, check_vma=False),
    "eight workers": tree_case(8),
    "policy": tree_case(4, {"kernel": "blockint", "bias": "uncompressed", "": STOCHASTIC}),
    "striped with metrics": striped_case(2**16),  # the smallest bucket that leaves are cut for
    "mean": case_of(summing(STOCHASTIC, by=dq.pmean), report_of(STOCHASTIC)),
    "psum_scatter unrolled": scatter_case(TWO_WIDTHS, "ring:unroll=True"),
    "psum_scatter all to all": scatter_case(STOCHASTIC, "all_to_all", check_vma=False),
    "all_gather ring": Case(
        gathering(TWO_WIDTHS), half_of(TWO_WIDTHS, "all_gather", "ring", 4), tree=HALF
    ),
    "hosts ring": hosts_case("ring"),
    "hosts butterfly": hosts_case("butterfly", check_vma=False),
    "hosts all to all": hosts_case("all_to_all"),
}


def values_of(case: Case) -> dict[str, np.ndarray]:
    count = int(np.prod(case.workers))
    return {
        name: of_workers(len(name), count, int(np.prod(shape))).reshape(*case.workers, *shape)
        for name, shape in case.tree.items()
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_gives_the_bits_of_the_simulation_and_sends_what_is_reported(name):
    """Along a slow axis, where compressed messages are integers, and along fast ones."""
    case = CASES[name]
    devices = jax.devices()[: int(np.prod(case.workers))]
    types = (AxisType.Auto,) * len(case.axes)
    mesh = jax.make_mesh(case.workers, case.axes, axis_types=types, devices=devices)
    program = mesh_program(case.local, mesh, check_vma=case.check_vma)
    arguments = KEY, (values_of(case),)
    compiled = program.lower(*arguments).compile()
    found = jax.tree.map(np.asarray, compiled(*arguments))

    simulated = functools.partial(case.local, KEY)
    for axis in reversed(case.axes):
        simulated = jax.vmap(simulated, axis_name=axis)
    expected = jax.jit(simulated)(values_of(case))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours, theirs)
        replicas = ours.reshape(len(devices), -1)
        assert np.isfinite(replicas).all() and replicas.any()
        assert not case.replicated or (replicas == replicas[0]).all()

    sent = collectives(compiled.as_text())
    fast = [c for c in sent if len(case.axes) == 2 and not c.dtypes <= {"u8", "u16"}]
    slow = [c for c in sent if c not in fast]
    assert round(sum(c.sent_bytes(case.workers[0]) for c in slow)) == case.sent
    assert round(sum(c.sent_bytes(case.workers[-1]) for c in fast)) == case.fast
