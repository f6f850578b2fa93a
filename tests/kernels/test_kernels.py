"""Kernels of Pallas, interpreted, against the base: the same bytes of every operation.

Nothing here needs a GPU or a TPU. Interpreted kernels run the same body that is compiled for one.
Nearly all of the time goes to compiling them.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import dynamiq_jax as dq
from dynamiq_jax._measurement.kernel_checks import CASES
from pallas_kernels import operations
from pallas_kernels._mosaic_tpu import launch
from pallas_kernels._triton import backend as triton
from pallas_kernels._triton import blocks as triton_blocks
from pallas_kernels._triton import message as triton_message
from pallas_kernels.backend import Backend
from pallas_kernels.codec.allocation import ENERGY_LIMIT
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.differences import compare
from pallas_kernels.modes import without_gpu
from pallas_kernels.pallas_backend import PallasBackend
from pallas_kernels.registry import BACKENDS, BASE
from pallas_kernels.trial import CALLS, CHUNK
from tests.support.kernel_cases import run, small_layout, some_messages, some_rows

# Interpreted kernels have the bits of the base where both are optimized.
pytestmark = pytest.mark.optimized
slow = pytest.mark.slow

KERNELS = [name for name, backend in BACKENDS.items() if isinstance(backend, PallasBackend)]
TINY = np.finfo(np.float32).tiny
# Others compile for longer.
FAST = {
    ("triton", "groups of 8", "hop"),
    ("triton", "two widths", "decompress_accumulate"),
    ("triton", "groups of 8", "decompress"),
    *((name, "default", "statistics") for name in KERNELS),
    *(("mosaic_tpu", "two rows", each) for each in ("decompress_accumulate", "decompress")),
    ("mosaic_tpu", "default", "widths"),
    *(("mosaic_gpu", "default", each) for each in ("hop", "decompress_accumulate")),
}
# A hop of all rows, and the other operations of some.
COMPARED = [
    (name, case, operation)
    for name in KERNELS
    for case in CASES
    for operation in CALLS
    if case != "many rows" and not BACKENDS[name].derives(CALLS[operation])
    if operation == "hop" or case in ("default", "two rows") or (name, case, operation) in FAST
]


@functools.cache
def trial_of(case):
    trial = CASES[case].trial()
    return trial, trial.calls(np.asarray(trial.send(BASE)))


@functools.cache
def output(name, case, operation):
    call = trial_of(case)[1][operation]
    jitted = jax.jit(lambda *arrays: call._replace(arrays=arrays).by(BACKENDS[name]))
    with without_gpu("interpret"):
        if reason := BACKENDS[name].why_not_here():
            pytest.skip(reason)
        return np.asarray(jitted(*call.arrays))


@pytest.mark.parametrize(
    ("name", "case", "operation"),
    [pytest.param(*each, marks=() if each in FAST else slow) for each in COMPARED],
)
def test_every_operation_has_the_bytes_of_the_base(name, case, operation):
    """Norms are sums in another order. XLA may contract sums of the base, but not of kernels."""
    trial, _ = trial_of(case)
    ours, base = (output(each, case, operation) for each in (name, "xla"))
    found = compare(ours, base, trial.layout, trial.widths)
    may_round = base.dtype == np.float32 and (name != "triton" or base.ndim == 1)
    assert found.differing == 0 or (may_round and found.is_rounding), found.text
    assert found.compared > 0.6 * base.nbytes
    if base.dtype == np.float32:  # rows that are lost are, and no others
        finite = np.isfinite(base)
        np.testing.assert_array_equal(np.isfinite(ours), finite)
        assert 0.5 < finite.mean() < 1 or case == "two rows"


def test_the_cases_have_all_choices_and_operations():
    assert {name for name, _, _ in FAST} == set(KERNELS)
    for name in KERNELS:
        own = {each for each in CALLS if not BACKENDS[name].derives(CALLS[each])}
        assert {operation for other, _, operation in COMPARED if other == name} == own
    several = [output("xla", "two widths", each) for each in ("hop", "hop of several")]
    assert np.any(several[0] != several[1])


# ------------------------------------------------------------------------------------------ Triton


@pytest.mark.parametrize("left_over", range(3))
@pytest.mark.parametrize("rows", (32, 37))
def test_zeros_end_where_the_message_does(rows, left_over):
    """The interpreter drops what a GPU would write into the memory behind it."""
    layout = dq.DynamiQ(bits=5.0).layout(256 * rows, num_chunks=1)
    used, written = layout.units - left_over, set()

    class Message:
        def __setitem__(self, at, zeros):
            assert not zeros.any()
            written.update(np.asarray(at).tolist())

    with jax.disable_jit():
        triton_message.pad(layout, jnp.int32(used), Message())
    half = UNIT // 2
    unused = range(half * used, half * layout.units)
    at_the_end = range(layout.padding_start // 2, layout.payload_bytes // 2)
    assert written == {*unused, *at_the_end}
    assert bool(at_the_end) == (rows == 37)


def test_factors_of_norms_are_not_subnormal(monkeypatch):
    """Hardware may flush them to zero, and the norm with them. A CPU does not."""
    factor = triton.inverse_unit

    def flushed(unit):
        found = factor(unit)
        return jnp.where(found < TINY, np.float32(0), found)

    monkeypatch.setattr(triton, "inverse_unit", flushed)
    rows = np.zeros((2, 256), np.float32)
    rows[:, 3] = 2.0**127, np.finfo(np.float32).max
    norms = run("triton", Backend.statistics, rows)
    np.testing.assert_allclose(norms, rows[:, 3], rtol=1e-6)


@slow
def test_blocks_of_any_size_write_every_byte(monkeypatch):
    """Onto memory that holds ones, which no byte of the message may keep, padding included."""

    def launch_onto_ones(kernel, grid, config, operands, out_shape):
        assert config == small

        def body(*refs):
            *inputs, _, out_ref = refs
            kernel(*inputs, out_ref)

        values = [jnp.asarray(operand) for operand in operands]
        arrays = [v if v.ndim else v.astype(jnp.int32).reshape(1) for v in values]
        return pl.pallas_call(
            body,
            out_shape=out_shape,
            grid=grid,
            interpret=True,
            input_output_aliases={len(arrays): 0},
        )(*arrays, jnp.full(out_shape.shape, 0xFFFF, out_shape.dtype))

    small = triton_blocks.LaunchConfig(rows=4, warps=2)
    monkeypatch.setattr(triton_blocks, "launch", launch_onto_ones)
    trial, calls = trial_of("two widths")
    assert trial.layout.padding_start < trial.layout.payload_bytes
    with without_gpu("interpret"):
        ours = np.asarray(jax.jit(lambda: calls["compress"].by(triton.Triton(small)))())
    base = output("xla", "two widths", "compress")
    assert compare(ours, base, trial.layout, trial.widths).differing == 0


# -------------------------------------------------------------------------------------- Mosaic TPU


def both(operation, *args, **static):
    """Return results of an operation by the kernels for TPUs and by the base."""
    return [run(name, operation, *args, **static) for name in ("mosaic_tpu", "xla")]


@st.composite
def some_energies(draw, chunks: int, rows: int):
    """Logarithms of any spread, many of them equal or zero, largest first in every chunk."""
    seed, most = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, ENERGY_LIMIT - 1))
    energies = np.random.default_rng(seed).integers(0, most + 1, (chunks, rows))
    energies[:, : draw(st.integers(0, rows))] = most
    return -np.sort(-energies, axis=1).astype(np.int32)


@slow
@pytest.mark.parametrize(
    ("chunks", "rows", "widths", "bits"),
    [
        (2, 90, (0, 2, 4, 5, 8), 4.3),
        (1, 1, (2,), 4.3),
        (3, 1100, (0, 9, 12), 9.7),
        (9, 40, (2, 4, 8, 16), 7.2),
    ],
)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_widths_of_any_energies_are_those_of_the_base(chunks, rows, widths, bits, data):
    layout = small_layout(rows, widths, bits, chunks)
    ours, expected = both(Backend.solve, data.draw(some_energies(chunks, rows)), layout=layout)
    np.testing.assert_array_equal(ours, expected)
    assert np.all(ours.sum(axis=1) <= layout.units)


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
    ours, expected = both(
        Backend.energies, layout.with_scales(empty, groups, supers), layout=layout
    )
    np.testing.assert_array_equal(ours, expected)
    assert not np.any(ours[:, ::7]) and np.any(ours)


@slow
@pytest.mark.parametrize(
    ("rows", "received", "dtype", "changes"),
    [
        (131, 1, "float32", {}),  # the last of two blocks begins at an odd place
        (300, 0, "float32", {"widths": (2,), "gap_ratio": 1}),  # units that no row needs
        # On both sides of a byte, and all widths.
        (40, 1, "float32", {"widths": (0, 8), "bits": 7.3}),
        (40, 1, "float32", {"widths": (0, 9), "bits": 8.3}),
        (131, 2, "bfloat16", {"widths": tuple(range(2, 17)), "bits": 9, "group_size": 16}),
    ],
)
def test_blocks_that_overlap_write_the_bytes_of_the_base(rows, received, dtype, changes):
    layout = small_layout(rows, **changes)
    args = some_messages(layout, dtype, 1, received), some_rows(layout, dtype, seed=9)
    ours, expected = both(Backend.hop, *args, CHUNK, received, layout=layout)
    np.testing.assert_array_equal(ours, expected)


@slow
def test_no_copy_races_with_another(monkeypatch):
    from jax.experimental.pallas import tpu as pltpu

    interpreter = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    interpret = functools.partial(pltpu.InterpretParams, detect_races=True)
    monkeypatch.setattr(launch.pltpu, "InterpretParams", interpret)
    layout = small_layout(300)
    local, messages = some_rows(layout), some_messages(layout, "float32", 1, 2)
    for operation, args in (
        (Backend.hop, (messages, local, CHUNK, 2)),
        (Backend.decompress_accumulate, (messages, local, CHUNK)),
        (Backend.decompress, (messages, local.places)),
    ):
        run("mosaic_tpu", operation, *args, layout=layout)
        assert interpreter.races is not None and not interpreter.races.races_found


@slow
def test_hops_in_a_scan_write_the_bytes_of_the_base():
    layout = small_layout(20)
    local = some_rows(layout)

    def hops(implementation, message, local):
        run = operations.by(implementation)

        def hop(message, turn):
            sent = run.hop(message[None], local, CHUNK, turn, layout=layout)
            return sent.view(message.dtype), None

        return jax.lax.scan(hop, message, jnp.arange(1, 4))[0]

    message = some_messages(layout, "float32", 1, 1)[0]
    with without_gpu("interpret"):
        ours, expected = (
            np.asarray(jax.jit(hops, static_argnums=0)(name, message, local))
            for name in ("mosaic_tpu", "xla")
        )
    np.testing.assert_array_equal(ours, expected)
    assert np.any(ours != np.asarray(message))
