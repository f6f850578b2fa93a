"""`dq.inspect`: what a train step sends, and the mistakes in it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._inspection.collectives import collectives_of, connected
from dynamiq_jax._inspection.devices import Devices
from dynamiq_jax._inspection.findings import Evidence
from dynamiq_jax._inspection.step import inspect_text

pytestmark = pytest.mark.frames
KEY = jax.random.key(0)
BATCH = jnp.ones((32, 512))
EXACT_PARAMS = {"w": jnp.zeros((512, 256)), "bias": jnp.zeros(256)}
SPECS = {"w": P("fsdp"), "bias": P()}


def mesh_of(**sizes: int) -> Mesh:
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def mapped(function, mesh: Mesh, *in_specs: P, check_vma: bool = False, **options):
    """A function on all devices of a mesh, whose results are the same on all."""
    specs = {"in_specs": in_specs, "out_specs": P(), "check_vma": check_vma}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs, **options))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["bias"][None, :] - 1) ** 2)


def updated(params, grads):
    return jax.tree.map(lambda p, g: p - g.astype(p.dtype), params, grads)


@functools.cache
def manual_step(mesh: Mesh, reduce, *, mark: bool = True, check_vma: bool = False):
    """A jitted step whose `reduce(grads, key)` runs inside `shard_map` over the whole mesh."""

    def local(params, batch, key):
        own = params
        if mark and check_vma:
            own = jax.lax.pcast(params, mesh.axis_names, to="varying")
        return updated(params, reduce(jax.grad(loss_fn)(own, batch), key))

    return mapped(local, mesh, P(), P(mesh.axis_names), P(), check_vma=check_vma)


def on_fsdp(mesh: Mesh):
    """The parameters, of which the matrix is split."""
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.device_put(EXACT_PARAMS, shardings)


def compressed(grads, key):
    return dq.pmean(grads, "data", key=key, method="bf16")  # which compiles fast


def kinds(found: dq.reports.Inspection) -> list[str]:
    return [finding.kind for finding in found.findings]


# ---------------------------------------------------------------------------- sound steps


def test_a_sound_step_has_no_findings_and_the_bytes_of_the_report():
    step = manual_step(mesh_of(data=4), compressed, check_vma=True)
    found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY)
    assert found.findings == ()
    report = dq.wire_report(EXACT_PARAMS, 4, method="bf16")
    assert found.bytes_compressed == report.compressed_bytes
    assert found.bytes_exact == report.exact_bytes
    assert {row.over for row in found.rows} == {"data"}
    assert all(row.where.startswith("test_inspect.py:") for row in found.rows)
    assert "No mistake found." in str(found)


def test_a_compressed_step_with_shardings_has_no_findings():
    mesh = mesh_of(data=4, fsdp=2)
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))

    def step(params, batch):
        return updated(params, jax.grad(loss_fn)(params, batch))

    step = dq.compress(jax.jit(step), "data", method="dynamiq:4")
    found = dq.inspect(step, on_fsdp(mesh), batch)
    assert found.findings == ()
    method = dq.Compression("dynamiq:4", specs=SPECS)
    report = dq.wire_report(EXACT_PARAMS, "data", mesh=mesh, method=method)
    assert found.bytes_compressed == report.compressed_bytes


def test_axes_in_two_levels_are_sound():
    """Only the slow axis is between hosts, and only that one is compressed."""
    step = manual_step(
        mesh_of(hosts=2, local=4),
        lambda grads, key: dq.pmean(grads, ("hosts", "local"), key=key, method="bf16"),
    )
    found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY, devices_per_host=4)
    assert found.findings == ()
    links = {(row.what, row.link) for row in found.rows if row.over in ("hosts", "local")}
    assert ("compressed, BF16()", "between hosts") in links
    assert ("exact, fast axes", "inside a host") in links


# ---------------------------------------------------------------------------- broken steps


def twice(grads, key):
    return compressed(jax.lax.pmean(grads, "data"), key)


def twice_the_other_way(grads, key):
    return jax.lax.pmean(compressed(grads, key), "data")


def beside(grads, key):
    """A large exact sum of other sizes."""
    exact = jax.lax.pmean(jnp.concatenate([grads["w"], grads["w"]]), "data")
    mean = compressed(grads, key)
    return mean | {"w": mean["w"] + exact[:512]}


def over_the_fast_axis(grads, key):
    norms = jax.lax.pmean(jnp.concatenate([grads["w"], grads["w"]]), "local")
    mean = dq.pmean(grads, ("hosts", "local"), key=key, method="bf16")
    return mean | {"w": mean["w"] + norms[:512]}


def scaled_by_their_norm(grads, key):
    norm = jax.lax.pmean(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)), "data")
    return jax.tree.map(lambda leaf: leaf * norm, compressed(grads, key))


def by_policy(grads, key):
    """Leaves that are exact by choice."""
    return dq.pmean(grads, "data", key=key, method={".*": "uncompressed"})


def frozen_and_repeated(grads, key):
    zeros = jax.tree.map(jnp.zeros_like, grads)
    both = compressed({"own": grads, "frozen": zeros}, key)
    again = compressed(jax.tree.map(lambda leaf: 2 * leaf, grads), key)
    return jax.tree.map(jnp.add, both["own"], again)


ON_DATA = {"data": 4}
# Sums of a step, its mesh, the devices of a host, the mistakes, and a part of their text.
SUMS = [
    (twice, ON_DATA, None, ["double reduction"], r"\['w'\]"),
    (twice_the_other_way, ON_DATA, None, ["double reduction"], r"\['w'\]"),
    (beside, ON_DATA, None, ["not compressed"], "is exact"),
    (over_the_fast_axis, {"hosts": 2, "local": 4}, None, [], ""),
    (scaled_by_their_norm, ON_DATA, None, [], ""),
    (by_policy, ON_DATA, None, [], ""),
    (
        *(frozen_and_repeated, ON_DATA, None, ["sent and thrown away", "sent repeatedly"]),
        "(?s)optax.masked.*sum once behind the loop",
    ),
    (compressed, {"data": 1, "model": 4}, None, ["one worker"], "'data'"),
    (compressed, ON_DATA, 4, ["fast link"], "'data'"),
    (compressed, ON_DATA, 1, [], ""),
    (compressed, ON_DATA, None, [], ""),
]


@pytest.mark.parametrize(("reduce", "sizes", "devices_per_host", "expected", "says"), SUMS)
def test_mistakes_of_sums_are_found_and_no_others(reduce, sizes, devices_per_host, expected, says):
    step = manual_step(mesh_of(**sizes), reduce)
    found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY, devices_per_host=devices_per_host)
    assert kinds(found) == expected
    assert re.search(says, str(found))
    assert all(finding.text in str(found) for finding in found.findings)
    assert ("One mistake found" in str(found)) == (len(expected) == 1)


def test_a_sum_by_autodiff_is_a_double_reduction():
    """The step cannot be traced, since types show it; the error becomes the finding."""
    step = manual_step(mesh_of(data=4), compressed, mark=False, check_vma=True)
    found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY)
    assert kinds(found) == ["double reduction"] and not found.is_compiled
    assert "jax.lax.pcast" in found.findings[0].text
    assert "raises an error" in str(found)


@pytest.mark.parametrize("specs", (P(), None), ids=("wrong", "missing"))
def test_gradients_of_sharded_parameters_are_sent_whole(specs):
    mesh = mesh_of(data=4, fsdp=2)

    def step(params, batch, key):
        gradient = jax.grad(loss_fn)(params, batch)
        return updated(
            params, dq.pmean(gradient, "data", key=key, method=dq.Compression("bf16", specs=specs))
        )

    over_data = mapped(step, mesh, P(), P("data"), P(), axis_names={"data"})
    found = dq.inspect(over_data, on_fsdp(mesh), BATCH, KEY)
    assert kinds(found) == ["whole gradient"]
    assert "'fsdp'" in found.findings[0].text and "specs" in found.findings[0].text


def test_a_shard_of_the_shape_of_another_parameter_is_no_whole_gradient():
    mesh = mesh_of(data=4, fsdp=2)
    shapes = {"into": (64, 128), "out": (128, 64), "frozen": (64, 64)}  # a half of "out"
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    params = jax.device_put(params, NamedSharding(mesh, P("fsdp")))
    rows = jax.device_put(jnp.ones((32, 64)), NamedSharding(mesh, P("data")))

    def loss(params, rows):
        return jnp.mean((jnp.tanh(rows @ params["into"]) @ params["out"]) ** 2)

    def step(params, rows):
        return updated(params, jax.grad(loss)(params, rows))

    found = dq.inspect(dq.compress(jax.jit(step), "data"), params, rows)
    assert len(found.steps[0].compressed) == 2 and kinds(found) == []


def test_small_leaves_are_below_the_threshold():
    params = {f"layer{n}": jnp.zeros((16, 32)) for n in range(8)}

    def reduce_all(params, batch, key):
        grads = jax.tree.map(lambda leaf: leaf + jnp.sum(batch), params)
        return updated(params, dq.pmean(grads, "data", key=key))

    step = mapped(reduce_all, mesh_of(data=4), P(), P("data"), P())
    found = dq.inspect(step, params, BATCH, KEY)
    assert kinds(found) == ["below the threshold"]
    assert "exact_below=1024" in found.findings[0].text
    assert "8 of 8 leaves" in found.findings[0].text and "100%" in found.findings[0].text


def sharded_and_compressed(grads, key):
    """Sums of a layer that is sharded over fsdp, as large as a parameter, in bfloat16 and exact."""
    partial = jax.lax.psum(grads["w"].astype(jnp.bfloat16), "fsdp")
    exact = jax.lax.psum(grads["w"] + 1, "fsdp")
    mean = compressed(grads, key)
    return mean | {"w": mean["w"] + partial.astype(jnp.float32) + exact}


@pytest.mark.parametrize("known", ("step", "text and mesh", "text"))
def test_exact_sums_over_another_axis_than_that_of_workers_are_sound(known):
    """Whether the axes are known or not."""
    mesh = mesh_of(data=2, fsdp=4)
    step = manual_step(mesh, sharded_and_compressed)
    if known == "step":
        found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY)
    else:
        text = step.lower(EXACT_PARAMS, BATCH, KEY).compile().as_text()
        found = inspect_text(text, meshes=[mesh] if "mesh" in known else [])
    assert found.findings == ()
    assert found.bytes_exact > found.bytes_compressed


@pytest.mark.parametrize(("workers", "expected"), ((("data",), 0), (("fsdp",), 1), ((), 1)))
def test_axes_of_workers_may_be_said_where_nothing_is_compressed(workers, expected):
    def reduce(grads, key):
        return jax.lax.psum(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), grads), "fsdp")

    mesh = mesh_of(data=2, fsdp=4)
    text = manual_step(mesh, reduce).lower(EXACT_PARAMS, BATCH, KEY).compile().as_text()
    found = inspect_text(text, Evidence(workers=workers), meshes=[mesh])
    assert len(kinds(found)) == expected == len(set(kinds(found)))


@pytest.mark.parametrize("in_the_optimizer", (True, False))
def test_an_optimizer_that_adds_up_sums_is_found(in_the_optimizer):
    """By its state, which a step takes and returns."""
    optimizer = optax.sgd(0.1)
    if in_the_optimizer:
        optimizer = optax.MultiSteps(optimizer, every_k_schedule=4)

    def local(params, state, batch, key):
        mean = compressed(jax.grad(loss_fn)(params, batch), key)
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    step = mapped(local, mesh_of(data=4), P(), P(), P("data"), P())
    state = optimizer.init(EXACT_PARAMS)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        found = dq.inspect(step, EXACT_PARAMS, state, BATCH, KEY)
    assert kinds(found) == ["sent repeatedly"] * in_the_optimizer
    assert not in_the_optimizer or "MultiSteps" in found.findings[0].text


# ---------------------------------------------------------------------------- the tool itself


def test_a_step_that_was_traced_before_is_inspected_all_the_same():
    """Plans are recorded while JAX traces, which it does once for equal arguments."""
    step = manual_step(mesh_of(data=4), compressed)
    step(EXACT_PARAMS, BATCH, KEY)
    for _ in range(2):
        found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY, devices_per_host=4)
        assert kinds(found) == ["fast link"]


def test_arguments_may_be_shapes_and_are_not_donated():
    step = jax.jit(
        lambda params, batch, key: manual_step(mesh_of(data=4), compressed)(params, batch, key),
        donate_argnums=0,
    )
    shapes = jax.eval_shape(lambda: EXACT_PARAMS)
    assert dq.inspect(step, shapes, BATCH, KEY).findings == ()
    params = jax.tree.map(jnp.copy, EXACT_PARAMS)
    dq.inspect(step, params, BATCH, KEY)
    assert not params["w"].is_deleted()


def test_errors_of_the_step_and_of_arguments_are_errors():
    with pytest.raises(TypeError, match="step=3 cannot be called"):
        dq.inspect(3)
    with pytest.raises(ValueError, match="devices_per_host=0"):
        dq.inspect(jnp.sin, 1.0, devices_per_host=0)
    with pytest.raises(ZeroDivisionError):
        dq.inspect(lambda x: 1 // 0, 1.0)


def test_a_step_without_collectives_says_so():
    found = dq.inspect(jnp.sin, jnp.ones(3))
    assert found.rows == () and found.findings == ()
    assert "no collectives" in str(found)


def test_metrics_and_the_way_back_have_rows_of_their_own():
    def checked(grads, key):
        return dq.pmean(grads, "data", key=key, method=dq.Compression("bf16", max_error=0.1))

    step = manual_step(mesh_of(data=4), checked)
    found = dq.inspect(step, EXACT_PARAMS, BATCH, KEY)
    rows = {row.what: row for row in found.rows}
    assert rows["estimate of the error"].bytes < 0.02 * found.bytes_compressed
    assert rows["exact leaves"].bytes == dq.wire_report(EXACT_PARAMS, 4).exact_bytes
    assert rows["exact, above max_error"].in_branch
    assert not rows["compressed, BF16()"].in_branch
    of_fallback = rows["exact, above max_error"].bytes
    assert found.bytes_in_branches == of_fallback > 100 * found.bytes_exact
    assert f"exact, and at most {format_bytes(of_fallback)} in branches" in found.summary


# ---------------------------------------------------------------------------- text of programs

PROGRAM = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%add_promoted (a2: f32[], b2: f32[]) -> f32[] {
  %a2 = f32[] parameter(0)
  %b2 = f32[] parameter(1)
  ROOT %sum2 = f32[] add(%a2, %b2)
}

ENTRY %main (p: f32[4096], q: u8[1000]) -> f32[4096] {
  %p = f32[4096]{0} parameter(0)
  %q = u8[1000]{0} parameter(1)
  %sent = (u8[1000]{0}, u8[1000]{0}, u32[], u32[]) collective-permute-start(%q), PAIRS, METADATA
  %done = u8[1000]{0} collective-permute-done(%sent)
  %gathered = ((u8[1000]{0}), u8[4000]{0}) all-gather-start(%q), GROUPS, METADATA
  %done2 = u8[4000]{0} all-gather-done(%gathered)
  %summed = f32[4096]{0} all-reduce-start(%p), replica_groups=[4,2]<=[8], to_apply=%add_promoted
  %done3 = f32[4096]{0} all-reduce-done(%summed)
  ROOT %all = f32[4096]{0} all-reduce(%done3), channel_id=4, replica_groups={}, to_apply=%add
}
"""
PROGRAM = (
    PROGRAM.replace("GROUPS", "replica_groups=[2,4]<=[4,2]T(1,0)")
    .replace("PAIRS", "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}")
    .replace("METADATA", 'metadata={op_name="jit(step)/dynamiq_jax.DynamiQ(bits=4)/ppermute"}')
)


def test_asynchronous_collectives_and_all_forms_of_groups_are_read():
    found = collectives_of(PROGRAM, Devices.of({"data": 4, "local": 2}, devices_per_host=2))
    seen = [(one.opcode, one.axes, one.link, one.bytes, one.labels) for one in found]
    label = ("DynamiQ(bits=4)",)
    assert seen == [
        ("collective-permute", ("data",), "between hosts", 1000, label),
        ("all-gather", ("data",), "between hosts", 3000, label),
        ("all-reduce", ("local",), "inside a host", 16384, ()),
        ("all-reduce", ("data", "local"), "between hosts", 2 * 7 / 8 * 16384, ()),
    ]


def test_a_program_without_a_known_mesh_has_groups():
    found = inspect_text(PROGRAM)
    assert {row.over for row in found.rows} == {"groups of 2", "groups of 4", "groups of 8"}
    permuted = next(one for one in collectives_of(PROGRAM, Devices({}, None)))
    assert permuted.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert {row.link for row in found.rows} == {"unknown"}
    assert kinds(found) == []
    nothing_compressed = inspect_text(PROGRAM.replace("dynamiq_jax.", ""))
    assert kinds(nothing_compressed) == ["not compressed", "not compressed"]


def program(lines: list[str], count: int = 4) -> str:
    """The text of a program on some devices: `%q`, and the results `%r0`, `%r1` ... of lines."""
    results = [f"  %r{number} = {line}" for number, line in enumerate(lines)]
    head = ["HloModule step, num_partitions=" + str(count), "", "ENTRY %main (q: u8[8]) -> u8[8] {"]
    return "\n".join([*head, "  %q = u8[8]{0} parameter(0)", *results, "}"]) + "\n"


def test_the_largest_sums_of_a_program_without_compression_are_named():
    sizes = 5_000_000, 2_000_000, 4_000_000, 1_000_000, 3_000_000
    text = program([f"f32[{size}]{{0}} all-reduce(%q), replica_groups={{}}" for size in sizes])
    named = [finding.text for finding in inspect_text(text).findings]
    assert [re.search(r"of (\d+) MB", text).group(1) for text in named] == ["30", "24", "18"]


def scattered(one: int, two: int) -> str:
    """The text of a program that scatters two sums of some elements, the second one compressed."""
    types, names = (f"f32[{one}]{{0}}", f"f32[{two}]{{0}}"), ("one", "dynamiq_jax.two")
    parts = [
        f'{types[i]} get-tuple-element(%r0), index={i}, metadata={{op_name="{names[i]}"}}'
        for i in range(2)
    ]
    return program([f"({', '.join(types)}) reduce-scatter(%q, %q)", *parts])


def test_what_the_compiler_combines_is_one_message():
    """The first part counts as run, and the others travel with it."""
    one, two = collectives_of(scattered(100, 100), Devices.of({"data": 4}))
    assert one.bytes == two.bytes == 3 * 400  # all of it but the part of the device
    assert one.sizes == two.sizes == (400,)
    assert (one.labels, two.labels) == ((), ("two",))
    assert (one.times, two.times) == (1, 0)
    found = inspect_text(scattered(100, 100))
    messages = {row.what: row.messages for row in found.rows}
    assert messages == {"reduce-scatter": 1, "compressed, two": 0}
    assert "joined" in str(found)


def test_results_of_an_asynchronous_sum_are_those_of_its_own_end():
    lines = []
    for name in ("one", "two"):
        end = f"%r{len(lines) + 1}"
        lines += [
            "(f32[100]{0}, f32[100]{0}) all-reduce-start(%q, %q), replica_groups={}",
            f"(f32[100]{{0}}, f32[100]{{0}}) all-reduce-done(%r{len(lines)})",
        ]
        lines += [
            f"f32[100]{{0}} get-tuple-element({end}), index={index}, "
            f'metadata={{op_name="dynamiq_jax.{name}"}}'
            for index in range(2)
        ]
    found = collectives_of(program(lines), Devices.of({"data": 4}))
    assert [one.labels for one in found] == [("one",), ("two",)]


@pytest.mark.parametrize(("percent", "expected"), ((4, []), (6, ["not compressed"])))
def test_an_exact_sum_matters_from_a_twentieth_of_the_bytes_on(percent, expected):
    assert kinds(inspect_text(scattered(1000 * percent, 100_000))) == expected


@given(st.lists(st.lists(st.integers(0, 12), min_size=2, max_size=2), min_size=1, max_size=20))
@example([[0, 1], [2, 3], [1, 2]])
def test_groups_with_common_members_are_one(groups):
    """As when each group joins all others that it meets, one after the other."""
    parts: list[set[int]] = []
    for group in groups:
        met = [part for part in parts if part & set(group)]
        parts = [part for part in parts if not part & set(group)] + [set(group).union(*met)]
    assert connected(np.array(groups)) == tuple(sorted(tuple(sorted(part)) for part in parts))


@dataclasses.dataclass(frozen=True)
class Processor:
    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "H200"


def test_hosts_are_processes_where_nothing_else_is_said():
    mesh = mesh_of(hosts=2, local=2)
    groups = {"hosts": np.array([[0, 2], [1, 3]]), "local": np.array([[0, 1], [2, 3]])}
    virtual = Devices.of(mesh)
    assert virtual.hosts is None and virtual.link(groups["hosts"]) == "unknown"
    given = Devices.of(mesh, devices_per_host=2)
    assert [given.link(groups[name]) for name in groups] == ["between hosts", "inside a host"]
    for hosts, expected in (((0, 0, 1, 1), "between hosts"), ((0,) * 4, "inside a host")):
        processors = [Processor(number, host) for number, host in enumerate(hosts)]
        cluster = Mesh(np.array(processors).reshape(2, 2), ("hosts", "local"))
        assert Devices.of(cluster).link(groups["hosts"]) == expected
        assert Devices.of(cluster).link(groups["local"]) == "inside a host"
