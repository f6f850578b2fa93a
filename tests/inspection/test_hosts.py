"""Bytes that each host sends to others: of compiled collectives, and of the model of `advise`."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._commands.advise import Advise
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices
from dynamiq_jax._inspection.inspection import Inspection, rows_of
from dynamiq_jax._inspection.step import inspect_text
from dynamiq_jax._prediction.advice import predictions
from dynamiq_jax._prediction.cost_model import bytes_of_host
from dynamiq_jax.methods import Axis, Call, WireCost
from dynamiq_jax.methods._registry import resolve_method
from dynamiq_jax.topologies import resolve_topology
from tests.inspection.test_inspect import mapped, mesh_of, program

SIZE = 3 * 2**14
EVERYTHING = dq.Compression(exact_below=0)
TOPOLOGIES = ("ring", "butterfly", "all_to_all")
CASES = [  # hosts, devices of each, topology, method
    *((*hosts, name, "bf16") for hosts in ((2, 8), (4, 4), (4, 1)) for name in TOPOLOGIES),
    *((3, 2, name, "bf16") for name in ("ring:unroll=True", "all_to_all")),
    (3, 2, "all_to_all", "dynamiq:5"),
    (2, 4, "ring", "dynamiq:5"),
]


def lowered(axes: dict[str, int], axis_name, method: str, topology: str) -> str:
    """The program of a sum on as many devices as a mesh has, which need not be there."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    program = mapped(_psum(axis_name, method, topology), mesh, P())
    traced = program.trace(jax.ShapeDtypeStruct((SIZE,), jnp.float32))
    program = traced.lower(lowering_platforms=("cpu",)).compiler_ir("hlo")
    return program.get_hlo_module().to_string()


def _psum(axis_name, method: str, topology: str):
    options = dq.Compression(method, topology)
    return lambda gradient: dq.psum(gradient, axis_name, key=jax.random.key(0), method=options)


def inspected(axes: dict[str, int], devices_per_host: int, text: str) -> Inspection:
    found = collectives_of(text, Devices.of(axes, devices_per_host))
    return Inspection(rows_of(found), ())


def messages(topology: str, n: int) -> Iterator[tuple[int, int, str, float]]:
    """Yield each message of an all-reduce: its sender, its receiver, its kind, and how many.

    Gathers go around a ring.
    """
    around = [(worker, (worker + 1) % n) for worker in range(n)] * (n - 1)
    straight = list(itertools.permutations(range(n), 2))
    yield from ((*pair, "payload", 1) for pair in around)
    yield from ((*pair, "statistics", 1) for pair in [*around, *straight])
    if topology.startswith("ring"):
        yield from ((*pair, "payload", 1) for pair in around)
    elif topology == "butterfly":
        distances = [2**turn for turn in range(n.bit_length() - 1)]
        yield from ((a, a ^ d, "payload", d) for d in distances for a in range(n))
    else:
        yield from ((*pair, "payload", 1) for pair in straight)


def sent_by_first_host(devices_per_host: int, topology: str, n: int, cost: WireCost) -> float:
    """Sum the messages of one axis of all devices that leave the first host."""
    sizes = {"payload": cost.payload_bytes, "statistics": cost.statistics_bytes / 2 / max(n - 1, 1)}
    return sum(
        sizes[kind] * count
        for source, target, kind, count in messages(topology, n)
        if source < devices_per_host <= target
    )


@pytest.mark.parametrize(("hosts", "local", "topology", "method"), CASES)
def test_one_axis_of_all_devices_sends_the_messages_of_its_topology(hosts, local, topology, method):
    """The program, the model of `advise` and an enumeration agree to the byte."""
    n, route = hosts * local, resolve_topology(topology)
    cost = resolve_method(method).wire_cost(Call(size=SIZE, axis=Axis("data", n), topology=route))
    expected = sent_by_first_host(local, topology, n, cost)
    found = inspected({"data": n}, local, lowered({"data": n}, "data", method, topology))
    assert found.bytes_of_host == pytest.approx(expected, rel=1e-12) and expected > 0
    assert sum(bytes_of_host(route, cost, n, local)) == pytest.approx(expected, rel=1e-12)
    assert found.bytes_compressed + found.bytes_exact == route.bytes_sent(cost, n)
    assert f"Each host sends {format_bytes(expected)} to others." in str(found)


@pytest.mark.parametrize(("hosts", "local"), ((2, 8), (4, 2), (3, 2)))
def test_hosts_send_one_gradient_where_they_sum_inside_first(hosts, local):
    axes = {"hosts": hosts, "local": local}
    found = inspected(axes, local, lowered(axes, ("hosts", "local"), "dynamiq:5", "ring"))
    part = jax.ShapeDtypeStruct((SIZE // local,), jnp.float32)
    report = dq.wire_report(part, hosts, method=dataclasses.replace(EVERYTHING, method="dynamiq:5"))
    assert found.bytes_of_host == local * report.bytes_per_worker
    by_link = {row.link: row.bytes_of_host for row in found.rows}
    assert by_link["inside a host"] == 0 < by_link["between hosts"]
    asked = Advise(size=str(SIZE), workers=hosts * local, devices_per_host=local, bits=(5.0,))
    options = {option.name: option for option in predictions(asked.question())}
    assert options["5 bits, ring"].sent_by_host == found.bytes_of_host
    assert options["5 bits, flat ring"].sent_by_host > 1.1 * found.bytes_of_host


@st.composite
def placed_groups(draw) -> tuple[np.ndarray, tuple[int, ...]]:
    """Draw groups of devices, and the host of each device."""
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    devices = draw(st.permutations(range(count * size)))
    names = st.sampled_from((0, 1, 5))
    hosts = draw(st.lists(names, min_size=count * size, max_size=count * size))
    return np.array(devices).reshape(count, size), tuple(hosts)


@given(placed_groups())
def test_each_host_sends_the_messages_that_leave_it(drawn):
    """Straight to all members, or around a ring on which those of a host are neighbors."""
    groups, hosts = drawn
    names = sorted(set(hosts))
    devices = Devices({}, hosts)
    ring, direct = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for group in groups.tolist():
        in_order = sorted(hosts[device] for device in group)
        for source, target in zip(in_order, in_order[1:] + in_order[:1], strict=True):
            ring[source] += source != target
        for source, target in itertools.permutations(group, 2):
            direct[hosts[source]] += (hosts[source] != hosts[target]) / (len(group) - 1)
    pairs = np.array(list(itertools.pairwise(groups.ravel().tolist()))).reshape(-1, 2)
    leaving = [
        sum(hosts[source] == name != hosts[target] for source, target in pairs) for name in names
    ]
    np.testing.assert_allclose(devices.sent_by_hosts(groups, "ring"), list(ring.values()))
    np.testing.assert_allclose(devices.sent_by_hosts(groups, "direct"), list(direct.values()))
    if len(pairs):
        np.testing.assert_array_equal(devices.sent_by_hosts(pairs, "pairs"), leaving)
    assert Devices({}, None).sent_by_hosts(groups, "ring") is None
    assert Devices({}, hosts[:-1]).sent_by_hosts(groups, "ring") is None


@pytest.mark.parametrize(
    ("opcode", "sent"),
    (
        ("all-reduce", 2 * 15 / 16),  # of the result, by the last device of a host on the ring
        ("reduce-scatter", 15),
        ("all-gather", 15 / 16),
        ("collective-broadcast", 1),
        ("all-to-all", 8 * 8 / 16),  # by eight devices to eight others
        ("ragged-all-to-all", 8 * 8 / 16),
    ),
)
@pytest.mark.parametrize(
    ("groups", "local_groups"),
    (
        ("[1,16]<=[16]", False),
        ("[2,8]<=[16]", True),
        ("mesh['h-1'=2,'l-1'=8] {'h-1','l-1'}", False),
        ("mesh['h-1'=2,'l-1'=8] {'l-1'}", True),
        ("mesh['all'=16] {'all':(2)8}", True),
        ("mesh['all'=16], device_ids=([2,8]T(1,0)) {'all':(1)8}", True),
    ),
)
def test_every_kind_of_collective_has_its_way(opcode, sent, groups, local_groups):
    (found,) = inspect_text(
        program([f"u8[1600]{{0}} {opcode}(%q), replica_groups={groups}"], count=16),
        meshes=[{"hosts": 2, "local": 8}],
        devices_per_host=8,
    ).rows
    assert found.what == opcode
    assert found.bytes_of_host == (0 if local_groups else 1600 * sent)


def test_the_host_that_sends_most_counts_over_all_messages_of_a_row():
    """Host 0 sends 1,000 bytes in one message, and host 1 in each of two others."""
    pairs = ("{{0,2}}", "{{2,0}}", "{{3,1},{0,1}}")
    sent = "u8[1000]{0} collective-permute(%q), source_target_pairs="
    text = program([sent + each for each in pairs])
    found = inspect_text(text, meshes=[{"data": 4}], devices_per_host=2)
    assert [(row.bytes, row.bytes_of_host) for row in found.rows] == [(3000, 2000)]
    assert "2 kB to others" in str(found)
    alone = inspect_text(text, meshes=[{"data": 4}])
    assert alone.bytes_of_host is None and "to others" not in str(alone)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("devices_per_host", "expected"), ((8, ["fast link"]), (4, []), (1, [])))
def test_an_axis_over_several_hosts_is_no_fast_link(topology, devices_per_host, expected):
    """Although a butterfly also has messages that stay inside of a host."""
    gradient = jnp.ones((64, 512))
    found = dq.inspect(_step(topology), gradient, devices_per_host=devices_per_host)
    assert [finding.kind for finding in found.findings] == expected
    assert (found.bytes_of_host == 0) == bool(expected)


@functools.cache
def _step(topology: str):
    return mapped(_psum("data", "bf16", topology), mesh_of(data=8), P())
