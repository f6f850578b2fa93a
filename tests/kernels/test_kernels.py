"""GPU kernels against the XLA base: the same bytes when interpreted, and programs that lower.

Nothing here needs a GPU. Interpreted kernels run the same body that is compiled for one. Nearly all
of the time goes to compiling them, so each layout has choices of its own.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks
from dynamiq_jax.topologies import Ring
from pallas_kernels import choice, modes, operations
from pallas_kernels._triton import backend as triton_backend
from pallas_kernels._triton import blocks as triton_blocks
from pallas_kernels._triton import message as triton_message
from pallas_kernels.codec import Layout, LocalRows, Places, make_places
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.rounding import ROUNDINGS
from pallas_kernels.modes import without_gpu
from tests.support import oracle

pytestmark = pytest.mark.optimized

KERNELS = ("triton",)
kernels = pytest.mark.parametrize("kernel", KERNELS)
SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
NUM_CHUNKS, ROWS = 3, 37
CHUNK = np.int32(1)
TINY = np.finfo(np.float32).tiny


class Case(NamedTuple):
    """A method, the dtype of local rows, and the width that most rows of a chunk have.

    The other widths have one row each, so that a block has rows of many widths.
    """

    method: dq.DynamiQ
    usual: int
    dtype: str = "float32"

    @property
    def widths(self) -> np.ndarray:
        """Widths of all places of a chunk."""
        allowed = self.method.layout(1, 1).allocation.widths
        others = [width for width in allowed if width != self.usual]
        return np.sort([*others, *[self.usual] * (ROWS - len(others))])[::-1]

    @property
    def layout(self) -> Layout:
        # Three units are left over.
        layout = self.method.layout(256 * NUM_CHUNKS * ROWS - 100, NUM_CHUNKS)
        return dataclasses.replace(layout, code_bits=(self.widths.sum() + 3) / ROWS)

    @property
    def places(self) -> Places:
        plane_rows = (self.widths[:, None] > np.arange(16)).sum(axis=0)
        return make_places(jnp.asarray(ORDER), jnp.tile(jnp.int32(plane_rows), (NUM_CHUNKS, 1)))


# Every width, group size, rounding, spacing and dtype.
CASES = {
    "all widths": Case(dq.DynamiQ(bits=9.0, widths=(0, *range(2, 17))), 4),
    "paper": Case(dq.DynamiQ.paper(), 4, "float16"),
    "groups of 8": Case(
        dq.DynamiQ(
            bits=4.0, widths=(10, 6, 2, 0), group_size=8, rounding="independent", gap_ratio=1
        ),
        2,
        "bfloat16",
    ),
    "two widths": Case(dq.DynamiQ(bits=5.0, widths=(3, 7), rounding="nearest"), 7),
    "wide": Case(dq.DynamiQ(bits=13.0, widths=(9, 16), group_size=16), 9),
}


# Places of a chunk follow one another in other steps than rows.
ORDER = (np.arange(NUM_CHUNKS * ROWS, dtype=np.int32) * 11 % (NUM_CHUNKS * ROWS)).reshape(
    NUM_CHUNKS, ROWS
)


@functools.cache
def rows_of(dtype: str, first_hard: int = 0) -> np.ndarray:
    """Rows of all chunks, in which every fourth place is hard in one of ten ways."""
    rng = np.random.default_rng(first_hard)
    rows = rng.standard_t(4, (NUM_CHUNKS * ROWS, 256))
    rows *= np.exp2(4 * rng.standard_normal((len(rows), 1)))
    for number, place in enumerate(range(first_hard, ROWS, 4)):
        for index in ORDER[:, place]:
            row = rows[index]
            match number:
                case 0:
                    row[:] = 0
                case 1:
                    row[::3] = 0
                case 2:
                    row *= 1e-30
                case 3:
                    row[7] = np.nan
                case 4:
                    row[100] = np.inf
                case 5:
                    row *= 1e-40  # subnormal
                case 6:
                    row[0] = 2.0**127
                case 7:
                    row[:] = -row[0]
                case 8:
                    row[50] = -np.inf
                case 9:
                    row[31:33] = -0.0, 1e30
    with np.errstate(over="ignore"):
        return np.asarray(jnp.asarray(rows, jnp.float32).astype(dtype))


def local_of(name: str, *, receives: bool) -> LocalRows:
    """Rows to send, or those of the next worker, which are hard in other places."""
    case = CASES[name]
    return LocalRows(rows_of(case.dtype, 2 if receives else 0), case.places, SEED)


def without_lost_rows(name: str, message: np.ndarray) -> np.ndarray:
    """Clear codes and group scales of rows that decode to NaN: what they hold has no meaning."""
    case = CASES[name]
    layout = case.layout
    group_size, units = layout.group_size, layout.units
    codes, groups, supers = oracle.parse_message(message, case.widths, units, group_size)
    lost = supers == oracle.BF16_NAN
    groups = np.where(lost[:, None], 0, groups).astype(np.uint8)
    codes[lost] = 0
    return oracle.pack_message(codes, groups, supers, case.widths, units)


def run(kernel: str, operation, *args, **kwargs):
    """Run an operation by a kernel that is interpreted, or by the XLA base."""
    jitted = jax.jit(functools.partial(operation, implementation=kernel, **kwargs))
    with without_gpu("interpret"):
        return jax.tree.map(np.asarray, jitted(*args))


@functools.cache
def compressed(name: str) -> np.ndarray:
    """Messages of all chunks, by the base."""
    compress = functools.partial(operations.compress, layout=CASES[name].layout)
    chunks = jnp.arange(NUM_CHUNKS)

    def all_chunks(local, implementation):
        step = functools.partial(compress, local, turn=0, implementation=implementation)
        return jax.lax.map(step, chunks)

    return run("xla", all_chunks, local_of(name, receives=False))


@functools.cache
def hop_of(kernel: str, name: str, received: int) -> np.ndarray:
    """A hop in which as many messages arrive; those of other chunks are as good."""
    args = compressed(name)[:received], local_of(name, receives=True), CHUNK, np.int32(received)
    return run(kernel, operations.hop, *args, layout=CASES[name].layout)


def test_the_cases_have_all_choices():
    methods = [case.method for case in CASES.values()]
    assert {int(w) for case in CASES.values() for w in case.widths} == {0, *range(2, 17)}
    assert {m.group_size for m in methods} == {8, 16, 32}
    assert {case.layout.quantizer.rounding for case in CASES.values()} == set(ROUNDINGS)
    assert {m.spacing for m in methods} == {"quadratic", "geometric"}
    assert {m.gap_ratio == 1 for m in methods} == {False, True}
    assert {case.dtype for case in CASES.values()} == {"float32", "float16", "bfloat16"}
    for first_hard in (0, 2):
        rows = rows_of("float32", first_hard)[ORDER[CHUNK]]
        assert np.isnan(rows).sum() == 1
        assert np.isinf(rows).sum() == 2


@kernels
@pytest.mark.parametrize(
    "name",
    # The others compile for longer.
    [pytest.param(n, marks=() if n == "groups of 8" else pytest.mark.slow) for n in CASES],
)
def test_a_hop_writes_the_bytes_of_the_base(kernel, name):
    ours, expected = (without_lost_rows(name, hop_of(k, name, 1)) for k in (kernel, "xla"))
    np.testing.assert_array_equal(ours, expected)
    super_scales = CASES[name].layout.scales(expected)[1]
    assert 0 < 2 * int(np.sum(np.asarray(super_scales) == oracle.BF16_NAN)) < ROWS


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


@pytest.mark.slow
@kernels
def test_any_number_of_messages_is_added(kernel):
    """Two here, and none where blocks have another size."""
    ours, expected = (
        without_lost_rows("two widths", hop_of(k, "two widths", 2)) for k in (kernel, "xla")
    )
    np.testing.assert_array_equal(ours, expected)
    assert np.any(expected != without_lost_rows("two widths", hop_of("xla", "two widths", 1)))


@kernels
def test_rows_come_back_where_they_were(kernel):
    name = "groups of 8"
    layout, messages = CASES[name].layout, compressed(name)
    decompress = functools.partial(operations.decompress, layout=layout)
    places = CASES[name].places
    ours, expected = (run(k, decompress, messages, places) for k in (kernel, "xla"))
    np.testing.assert_array_equal(ours, expected)
    rows = rows_of(CASES[name].dtype).astype(np.float32)
    lost = ~np.all(np.abs(rows) <= 2.0**126 - 2.0**118, axis=1)  # NaN too
    np.testing.assert_array_equal(np.isnan(ours).all(axis=1), lost)
    assert np.isfinite(ours[~lost]).all()
    assert lost.sum() == 4 * NUM_CHUNKS


@kernels
def test_messages_are_added_to_the_local_rows(kernel):
    layout, local = CASES["two widths"].layout, local_of("two widths", receives=True)
    received = compressed("two widths")[:2]
    accumulate = functools.partial(operations.decompress_accumulate, layout=layout)
    ours, expected = (run(k, accumulate, received, local, CHUNK) for k in (kernel, "xla"))
    np.testing.assert_array_equal(ours, expected)
    # Decoded message by message.
    first, second = (
        run("xla", operations.decompress, np.stack([m] * 3), local.places, layout=layout)
        for m in received
    )
    total = (first.astype(np.float64) + second + local.rows)[ORDER[CHUNK]]
    finite = np.isfinite(ours)
    assert finite.mean() > 0.5
    magnitudes = np.abs(np.stack([first, second, local.rows])[:, ORDER[CHUNK]]).sum(axis=0)
    allowed = 2.0**-22 * magnitudes + TINY  # which is flushed in some places
    assert np.all(np.abs(ours[finite] - total[finite]) <= allowed[finite])


@pytest.mark.slow
@kernels
def test_sums_in_an_order_of_their_own_are_those_of_the_base(kernel):
    """Sums, messages in a new order, and values decoded from them, as in an all-to-all."""
    layout = CASES["paper"].layout

    def sum_and_values(messages, local, implementation):
        codec = DynamiQChunks(local=local, layout=layout, implementation=implementation)
        sums = codec.of_sums(8)
        payload = sums.hop(messages, CHUNK, 2)
        return payload, sums.decompress(jnp.stack([payload] * NUM_CHUNKS))

    args = compressed("paper")[:2], local_of("paper", receives=True)
    ours, expected = (run(k, sum_and_values, *args) for k in (kernel, "xla"))
    # Values say it all but the scales of rows that decode to zeros.
    for found, of_base in zip(*map(layout.scales, (ours[0], expected[0])), strict=True):
        np.testing.assert_array_equal(found, of_base)
    np.testing.assert_array_equal(ours[1], expected[1])
    assert np.any(expected[0] != hop_of("xla", "paper", 2))


@kernels
@pytest.mark.parametrize("num_rows", (1, 16, 37))
def test_statistics_are_those_of_the_base(kernel, num_rows):
    rows = rows_of("float32")[:num_rows].copy()
    rows[-1] = 1e38  # its reciprocal is subnormal
    ours, expected = (run(k, operations.statistics, rows) for k in (kernel, "xla"))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(ours), finite)
    # The order of a sum may differ between backends.
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-6)


def test_factors_of_norms_are_not_subnormal(monkeypatch):
    """Hardware may flush them to zero, and the norm with them. A CPU does not."""
    factor = triton_backend.inverse_unit

    def flushed(unit):
        found = factor(unit)
        return jnp.where(found < TINY, np.float32(0), found)

    monkeypatch.setattr(triton_backend, "inverse_unit", flushed)
    rows = np.zeros((2, 256), np.float32)
    rows[:, 3] = 2.0**127, np.finfo(np.float32).max
    norms = run("triton", operations.statistics, rows)
    np.testing.assert_allclose(norms, rows[:, 3], rtol=1e-6)


@pytest.mark.slow
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
    layout = CASES["two widths"].layout
    assert layout.padding_start < layout.payload_bytes
    monkeypatch.setattr(triton_blocks, "launch", launch_onto_ones)

    def compress(*args, implementation):
        nothing = jnp.zeros((0, layout.payload_bytes), jnp.uint8)
        return triton_backend.Triton(small).hop(nothing, *args, layout=layout)

    ours = run("triton", compress, local_of("two widths", receives=False), CHUNK, np.int32(0))
    ours, expected = (
        without_lost_rows("two widths", message) for message in (ours, compressed("two widths")[1])
    )
    np.testing.assert_array_equal(ours, expected)


# ---------------------------------------------------------------- what a compiler for GPUs is given


def lower_for_gpu(function, *args) -> str:
    """Lower for CUDA on a machine that has none."""
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@kernels
@pytest.mark.parametrize(
    "name",
    ("all widths", *(pytest.param(n, marks=pytest.mark.slow) for n in ("paper", "groups of 8"))),
)
def test_every_kernel_lowers_for_a_gpu(kernel, name, gpu_target):
    layout = CASES[name].method.layout(256 * NUM_CHUNKS * 1000 - 100, NUM_CHUNKS)
    shape = jax.ShapeDtypeStruct
    rows = shape((layout.num_rows, 256), CASES[name].dtype)
    of_places = shape((NUM_CHUNKS, layout.rows_per_chunk), "int32")
    places = Places(of_places, of_places, shape((NUM_CHUNKS, 17), "int32"))
    local = LocalRows(rows, places, shape((2,), "uint32"))
    messages = shape((NUM_CHUNKS, layout.payload_bytes), "uint8")
    scalar = shape((), "int32")
    bind = functools.partial(functools.partial, implementation=kernel)
    with_layout = functools.partial(bind, layout=layout)
    with without_gpu("compile"), gpu_target:
        texts = [
            lower_for_gpu(with_layout(operations.compress), local, scalar, scalar),
            lower_for_gpu(with_layout(operations.hop), messages, local, scalar, scalar),
            lower_for_gpu(with_layout(operations.decompress), messages, places),
            lower_for_gpu(with_layout(operations.decompress_accumulate), messages, local, scalar),
            lower_for_gpu(bind(operations.statistics), rows),
        ]
    assert [text.count("custom_call @") for text in texts] == [1] * len(texts)


@pytest.fixture
def gpu_target():
    """Context that tells newer versions of JAX which GPU to lower for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def count(jaxpr, primitive: str) -> int:
    """Count the calls of a primitive anywhere in a traced program."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == primitive
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if equation.primitive.name != primitive and hasattr(inner, "eqns"):
                found += count(inner, primitive)
    return found


@pytest.mark.sampled(2)
@kernels
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("bidirectional", (False, True))
def test_a_program_has_one_kernel_for_each_hop(data_mesh, kernel, bidirectional, check_vma):
    """Statistics, the first hop, the one in the loop, and the decoding: nothing else."""

    def local(key, gradient):
        with without_gpu("compile"):
            ours = dq.DynamiQ(implementation=kernel)
            topology = Ring(bidirectional=bidirectional)
            return dq.pmean(gradient[0], "data", key=key, method=dq.Compression(ours, topology))

    mapped = jax.shard_map(
        local, mesh=data_mesh(8), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    gradient = jax.ShapeDtypeStruct((8, 1 << 16), jnp.float32)
    traced = jax.jit(mapped).trace(jax.random.key(0), gradient)
    # A bidirectional ring has two of each, and the last step once more outside of the loop.
    expected = 1 + 2 + 4 + 1 if bidirectional else 1 + 1 + 1 + 1
    assert count(traced.jaxpr.jaxpr, "pallas_call") == expected


def test_the_fastest_backend_is_chosen_for_the_platform(gpu_target):
    """Kernels where the program is for a GPU, and the base elsewhere, from one trace."""
    layout, local = CASES["two widths"].layout, local_of("two widths", receives=False)
    with without_gpu("compile"), gpu_target:
        compress = functools.partial(operations.compress, layout=layout)
        traced = jax.jit(compress).trace(local, np.int32(0), np.int32(0))
        for platform, kernels_there in (("cuda", True), ("cpu", False)):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert ("triton" in text) == kernels_there
    assert modes.interpreting() is False


def test_arrays_beyond_32_bit_indices_are_left_to_the_base(monkeypatch):
    """Kernels count elements in int32, which 2^31 of them overflow."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # whose kernels are traced at once
    with without_gpu("compile"):
        for rows, kernels_there in ((2**23 - 1, 1), (2**23, 0)):
            shape = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
            traced = jax.jit(operations.statistics).trace(shape)
            assert count(traced.jaxpr.jaxpr, "pallas_call") == kernels_there


# ------------------------------------------------------------------------------ choice of a backend


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as far as the choice of a backend looks at it."""

    platform: str
    compute_capability: str = ""


@pytest.fixture
def devices(monkeypatch):
    """`devices(*them)`: pretend that this machine has these devices."""

    def pretend(*them: Device) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: them[0].platform)
        monkeypatch.setattr(jax, "local_devices", lambda: list(them))

    return pretend


def test_a_backend_that_cannot_run_is_refused_with_the_reason(devices):
    devices(Device("cpu"))
    reason = r"implementation='triton' cannot run here: the default devices are not GPUs"
    with pytest.raises(ValueError, match=reason):
        dq.DynamiQ(implementation="triton")
    with without_gpu("compile"):
        dq.DynamiQ(implementation="triton")
    with pytest.raises(ValueError, match=reason):  # not beyond the context
        dq.DynamiQ(implementation="triton")


def test_all_gpus_have_to_be_new_enough(devices):
    devices(Device("gpu", "9.0"), Device("gpu", "8.0"), Device("cpu"))
    dq.DynamiQ(implementation="triton")
    devices(Device("gpu", "9.0"), Device("gpu", "7.5"))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0, and this GPU has 7\.5"):
        dq.DynamiQ(implementation="triton")
    devices(Device("gpu", "gfx942"))  # of AMD
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0"):
        dq.DynamiQ(implementation="triton")


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="implementation='cuda' is not a backend"):
        choice.check("cuda")
    for name in (None, "xla"):
        choice.check(name)
