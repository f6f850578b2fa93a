"""The Mosaic TPU kernels: interpreted, against the XLA base, and lowered for a TPU."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks
from pallas_kernels import choice, message_types, modes, operations
from pallas_kernels._mosaic_tpu import launch
from pallas_kernels.codec import Layout, LocalRows, Places
from pallas_kernels.codec.allocation import ENERGY_LIMIT
from tests.support import oracle
from tests.support.kernel_cases import run, small_layout, some_messages, some_rows

slow = pytest.mark.slow

ALL_WIDTHS = tuple(range(2, 17))
CHUNK = np.int32(1)


def hard_rows(layout: Layout, dtype="float32", seed: int = 9) -> LocalRows:
    """`some_rows`, of which a few at either end of a chunk are hard."""
    local = some_rows(layout, dtype, seed)
    rows = np.array(local.rows.astype(jnp.float32))
    places = np.asarray(local.places.order[CHUNK])
    with np.errstate(over="ignore"):
        for number, place in enumerate(np.r_[: len(places) : max(len(places) // 9, 1)]):
            row = rows[places[place]]
            match number:
                case 0:
                    row[7] = np.nan
                case 1:
                    row[:] = 0
                case 2:
                    row[32:64] = 0
                case 3:
                    row[100] = -np.inf
                case 4:
                    row *= 1e-40  # subnormal
                case 5:
                    row[0] = 2.0**127
                case 6:
                    row[:] = -row[0]
                case 7:
                    row *= 1e-30
                case 8:
                    row[31:33] = -0.0, 1e30
        return local._replace(rows=jnp.asarray(rows).astype(dtype))


def without_lost_rows(layout: Layout, local: LocalRows, message: np.ndarray) -> np.ndarray:
    """Clear codes and group scales of rows that decode to NaN: what they hold has no meaning."""
    widths = np.asarray(local.places.widths[CHUNK])
    codes, groups, supers = oracle.parse_message(message, widths, layout.units, layout.group_size)
    lost = supers == oracle.BF16_NAN
    groups = np.where(lost[:, None], 0, groups).astype(np.uint8)
    codes[lost] = 0
    return oracle.pack_message(codes, groups, supers, widths, layout.units)


def check_hop(rows: int, received: int, dtype: str, changes: dict) -> None:
    layout = small_layout(rows, **changes)
    local = hard_rows(layout, dtype)
    args = some_messages(layout, dtype, 1, received), local, CHUNK, received
    ours, expected = (
        run(backend, operations.hop, *args, layout=layout) for backend in ("mosaic_tpu", "xla")
    )
    np.testing.assert_array_equal(
        without_lost_rows(layout, local, ours), without_lost_rows(layout, local, expected)
    )
    # Every byte of the message is written, padding and unused units included.
    end = slice(layout.padding_start, None)
    np.testing.assert_array_equal(ours[end], expected[end])
    used = int(local.places.starts[CHUNK, -1])
    assert not np.any(np.asarray(layout.planes(ours))[used:])


WIDE = {"widths": ALL_WIDTHS, "bits": 9, "group_size": 16, "rounding": "independent"}
CASES = [
    (131, 1, "float32", {}),  # the last of two blocks begins at an odd place
    (20, 2, "float32", {}),
    (20, 1, "float16", {"spacing": "geometric", "rounding": "nearest", "group_size": 8}),
    (300, 0, "float32", {"widths": (2,), "gap_ratio": 1}),  # units that no row needs
]


@pytest.mark.parametrize(
    ("rows", "received", "dtype", "changes"),
    [CASES[0], *(pytest.param(*case, marks=slow) for case in CASES[1:])],
)
@pytest.mark.slow
def test_a_hop_writes_the_bytes_of_the_base(rows, received, dtype, changes):
    check_hop(rows, received, dtype, changes)


@pytest.mark.parametrize(
    ("rows", "received", "dtype", "changes"),
    [
        (20, 2, "float32", {}),
        pytest.param(131, 1, "bfloat16", WIDE, marks=slow),
        pytest.param(1, 3, "float16", {"bits": 4, "spacing": "geometric"}, marks=slow),
    ],
)
def test_a_sum_is_that_of_the_base(rows, received, dtype, changes):
    layout = small_layout(rows, **changes)
    args = some_messages(layout, dtype, 1, received), hard_rows(layout, dtype), CHUNK
    ours, expected = (
        run(backend, operations.decompress_accumulate, *args, layout=layout)
        for backend in ("mosaic_tpu", "xla")
    )
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(ours), finite)
    # XLA contracts multiply-adds of the base, but not those of the interpreted kernel.
    largest = np.max(np.abs(expected), axis=1, keepdims=True, where=finite, initial=1e-30)
    ours, expected = (np.where(finite, sums, 0) / largest for sums in (ours, expected))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("rows", "dtype", "changes"),
    [(20, "float32", {}), pytest.param(131, "bfloat16", WIDE, marks=slow)],
)
def test_rows_come_back_where_they_were(rows, dtype, changes):
    layout = small_layout(rows, **changes)
    local = hard_rows(layout, dtype)
    compress = functools.partial(operations.compress, layout=layout)
    messages = np.stack([run("xla", compress, local, chunk, 0) for chunk in range(2)])
    ours, expected = (
        run(backend, operations.decompress, messages, local.places, layout=layout)
        for backend in ("mosaic_tpu", "xla")
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-6, equal_nan=True)
    lost = ~np.all(np.abs(np.asarray(local.rows, np.float32)) <= 2.0**126 - 2.0**118, axis=1)
    np.testing.assert_array_equal(np.isnan(ours).all(axis=1), lost)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
def test_norms_are_those_of_the_base(dtype):
    rows = hard_rows(small_layout(90), dtype).rows.at[-1].set(1e38)
    ours, expected = (run(k, operations.statistics, rows) for k in ("mosaic_tpu", "xla"))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(ours), finite)
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ any values


def both(operation, *args, **static):
    """Return results of an operation by the kernels and by the base, compiled once for all."""
    key = operation.__name__, tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(args)), str(static)
    if key not in compiled:
        compiled[key] = [
            jax.jit(functools.partial(operation, implementation=name, **static))
            for name in ("mosaic_tpu", "xla")
        ]
    with modes.without_gpu("interpret"):
        return [jax.tree.map(np.asarray, function(*args)) for function in compiled[key]]


compiled: dict = {}


@st.composite
def some_energies(draw, chunks: int, rows: int):
    """Logarithms of any spread, many of them equal or zero, largest first in every chunk."""
    seed, most = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, ENERGY_LIMIT - 1))
    energies = np.random.default_rng(seed).integers(0, most + 1, (chunks, rows))
    energies[:, : draw(st.integers(0, rows))] = most
    return -np.sort(-energies, axis=1).astype(np.int32)


def check_widths(energies, layout):
    ours, expected = both(operations.solve, energies, layout=layout)
    np.testing.assert_array_equal(ours, expected)
    assert np.all(ours.sum(axis=1) <= layout.units)


@given(some_energies(2, 90))
@settings(max_examples=15, deadline=None)
def test_widths_are_those_of_the_base(energies):
    check_widths(energies, small_layout(90))


SOLVED = [(1, 1, (2,), 4.3), (3, 1100, (0, 9, 12), 9.7), (9, 40, (2, 4, 8, 16), 7.2)]


@slow
@pytest.mark.parametrize(("chunks", "rows", "widths", "bits"), SOLVED)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_widths_of_any_layout_are_those_of_the_base(chunks, rows, widths, bits, data):
    layout = dataclasses.replace(
        small_layout(rows, widths, bits), num_chunks=chunks, size=rows * 256 * chunks
    )
    check_widths(data.draw(some_energies(chunks, rows)), layout)


@slow
@given(seed=st.integers(0, 2**32 - 1), turn=st.integers(0, 7), octaves=st.integers(-60, 60))
@settings(max_examples=25, deadline=None)
def test_a_hop_of_any_rows_writes_the_bytes_of_the_base(seed, turn, octaves):
    layout = small_layout(20)
    local = hard_rows(layout, seed=seed)
    local = local._replace(rows=jnp.ldexp(local.rows, octaves))
    ours, expected = both(operations.compress, local, CHUNK, np.int32(turn), layout=layout)
    ours, expected = (message_types.convert(each, jnp.uint8) for each in (ours, expected))
    np.testing.assert_array_equal(
        without_lost_rows(layout, local, np.asarray(ours)),
        without_lost_rows(layout, local, np.asarray(expected)),
    )


@slow
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_energies_of_any_scales_are_those_of_the_base(seed):
    layout = small_layout(20)
    rng = np.random.default_rng(seed)
    supers = rng.integers(0, 0x7E80, (2, 20)).astype(np.uint16)
    supers[:, ::7] = 0x7FC0  # NaN
    groups = rng.integers(0, 256, (2, 20, layout.groups)).astype(np.uint8)
    empty = jnp.zeros((2, layout.payload_bytes), jnp.uint8)
    messages = layout.with_scales(empty, groups, supers)
    ours, expected = both(operations.energies, messages, layout=layout)
    np.testing.assert_array_equal(ours, expected)
    assert not np.any(ours[:, ::7]) and np.any(ours)


@slow
def test_sums_in_an_order_of_their_own_are_those_of_the_base():
    """Sums, messages in a new order, and values decoded from them, as in an all-to-all."""
    layout = small_layout(24)

    def sum_and_values(messages, local, implementation):
        messages = message_types.convert(messages, implementation_dtype(implementation))
        codec = DynamiQChunks(local=local, layout=layout, implementation=implementation)
        sums = codec.of_sums(8)
        payload = sums.hop(messages, CHUNK, 2)
        values = sums.decompress(jnp.stack([payload] * layout.num_chunks))
        return message_types.convert(payload, jnp.uint8), values

    implementation_dtype = choice.message_dtype
    args = some_messages(layout, "float32", 1, 2), hard_rows(layout)
    ours, expected = (run(k, sum_and_values, *args) for k in ("mosaic_tpu", "xla"))
    for found, of_base in zip(*map(layout.scales, (ours[0], expected[0])), strict=True):
        np.testing.assert_array_equal(found, of_base)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-6, equal_nan=True)


@slow
def test_no_copy_races_with_another(monkeypatch):
    from jax.experimental.pallas import tpu as pltpu

    interpreter = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    interpret = functools.partial(pltpu.InterpretParams, detect_races=True)
    monkeypatch.setattr(launch.pltpu, "InterpretParams", interpret)
    layout = small_layout(300)
    local, messages = some_rows(layout), some_messages(layout, "float32", 1, 2)
    for operation, args in (
        (operations.hop, (messages, local, CHUNK, 2)),
        (operations.decompress_accumulate, (messages, local, CHUNK)),
        (operations.decompress, (messages, local.places)),
    ):
        run("mosaic_tpu", operation, *args, layout=layout)
        assert interpreter.races is not None and not interpreter.races.races_found


# ---------------------------------------------------------------- what a compiler for TPUs is given


@pytest.fixture
def tpu_target():
    """Context that tells newer versions of JAX which TPU to lower for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def all_operations(layout: Layout, implementation: str | None, local: LocalRows):
    """Run every operation once."""
    options = {"layout": layout, "implementation": implementation}
    sent = operations.compress(local, 1, 0, **options)
    sent = operations.hop(sent[None], local, 1, 1, **options)
    received = jnp.stack([sent, sent])
    decoded = operations.decompress(received, local.places, **options)
    added = operations.decompress_accumulate(received, local, 1, **options)
    return sent, decoded, added, operations.statistics(local.rows, implementation=implementation)


@pytest.mark.parametrize(
    ("rows", "dtype", "changes"),
    [
        (1000, "float32", {}),
        pytest.param(1000, "bfloat16", {"widths": ALL_WIDTHS, "spacing": "geometric"}, marks=slow),
    ],
)
def test_all_operations_lower_for_a_tpu(rows, dtype, changes, tpu_target):
    layout = small_layout(rows, **changes)
    function = functools.partial(all_operations, layout, "mosaic_tpu")
    local = some_rows(layout, dtype)
    with modes.without_gpu("compile"), tpu_target:
        traced = jax.jit(function).trace(local)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 5


def test_they_are_the_default_on_a_tpu_and_nowhere_else(monkeypatch, tpu_target):
    layout = small_layout(20)
    function = functools.partial(all_operations, layout, None)
    local = some_rows(layout)
    assert "uint32" not in str(jax.make_jaxpr(function)(local).out_avals[0])
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with modes.without_gpu("compile"), tpu_target:
        traced = jax.jit(function).trace(local)
        for platform, kernels in (("tpu", 5), ("cpu", 0)):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert text.count("@tpu_custom_call") == kernels


def mean_in_a_scan(topology, steps, key, gradient):
    """Return the mean of the gradients of a few steps, each compressed."""

    def step(total, number):
        with modes.without_gpu("compile"):
            ours = dq.DynamiQ(implementation="mosaic_tpu")
            step_key = jax.random.fold_in(key, number)
            mean = dq.pmean(
                gradient[0], "data", key=step_key, method=dq.Compression(ours, topology)
            )
        return total + mean / steps, None

    total = jnp.zeros(gradient.shape[1:], gradient.dtype)
    return jax.lax.scan(step, total, jnp.arange(steps))[0]


@pytest.mark.parametrize(
    ("topology", "kernels", "check_vma", "axis_type"),
    [
        ("ring", 5, True, AxisType.Explicit),
        pytest.param("ring", 5, False, AxisType.Auto, marks=slow),
        pytest.param("all_to_all", 10, True, AxisType.Auto, marks=slow),
    ],
)
def test_kernels_are_all_that_touches_rows(topology, kernels, check_vma, axis_type):
    """Norms, widths, the first hop, the one in the loop, and the decoding.

    An all-to-all has a sum, and on both sides the energies and the widths of its rows.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    mapped = jax.shard_map(
        functools.partial(mean_in_a_scan, topology, 3),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    split = NamedSharding(mesh, P("data"))
    gradient = jax.ShapeDtypeStruct((8, 1 << 16), jnp.float32, sharding=split)
    traced = jax.jit(mapped).trace(jax.random.key(0), gradient)
    assert str(traced.jaxpr).count("pallas_call[") == kernels


@slow
def test_hops_in_a_scan_write_the_bytes_of_the_base():
    layout = small_layout(20)
    local = some_rows(layout)

    def hops(message, local, implementation):
        dtype = message.dtype

        def hop(message, turn):
            sent = operations.hop(
                message[None], local, CHUNK, turn, layout=layout, implementation=implementation
            )
            return message_types.convert(sent, dtype), None

        return jax.lax.scan(hop, message, jnp.arange(1, 4))[0]

    message = some_messages(layout, "float32", 1, 1)[0]
    ours, expected = (run(name, hops, message, local) for name in ("mosaic_tpu", "xla"))
    np.testing.assert_array_equal(ours, expected)
    assert np.any(ours != np.asarray(message))


# ------------------------------------------------------------------------------ choice of a backend


class Device:
    """A device as far as the choice of a backend looks at it."""

    def __init__(self, kind: str):
        self.platform, self.device_kind = "tpu", kind


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match="the default devices are not TPUs"):
        operations.statistics(jnp.zeros((1, 256)), implementation="mosaic_tpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("TPU v5 lite"), Device("TPU v3")])
    with pytest.raises(ValueError, match="v5e, v5p and v6e, and this is a 'TPU v3'"):
        choice.check("mosaic_tpu")
    assert choice.message_dtype(None) == jnp.uint8
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("TPU v6 lite")])
    choice.check("mosaic_tpu")
    assert choice.message_dtype(None) == jnp.uint32


def test_messages_that_vector_memory_cannot_hold_are_left_to_the_base(monkeypatch):
    layout = small_layout(1 << 19)
    places = jax.tree.map(
        lambda size: jax.ShapeDtypeStruct((2, size), "int32"), Places(1 << 19, 1 << 19, 17)
    )
    rows = jax.ShapeDtypeStruct((layout.num_rows, 256), "bfloat16")
    local = LocalRows(rows, places, jax.ShapeDtypeStruct((2,), "uint32"))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with modes.without_gpu("compile"):
        hop = functools.partial(operations.compress, chunk=0, turn=0, layout=layout)
        assert "vmem_limit_bytes" not in str(jax.make_jaxpr(hop)(local))
        with pytest.raises(ValueError, match=r"1 messages of [\d,]+ bytes are more than"):
            jax.eval_shape(functools.partial(hop, implementation="mosaic_tpu"), local)
