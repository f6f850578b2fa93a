"""GPU kernels against the XLA base: the same bytes when interpreted, and programs that lower.

Nothing here needs a GPU. Interpreted kernels run the very body that is compiled for one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods._dynamiq_codec import DynamiQChunks
from dynamiq_jax.topologies import Ring
from pallas_kernels import implementation
from pallas_kernels.codec.layout import Layout
from pallas_kernels.implementation import without_gpu
from pallas_kernels.operations import compress, decompress, decompress_accumulate, hop, statistics

KERNELS = ("triton",)
kernels = pytest.mark.parametrize("kernel", KERNELS)
SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
NUM_CHUNKS = 3

# Every width, group size, rounding and spacing, and classes from one row to more than one block.
METHODS = {
    "default": dq.DynamiQ(),
    "paper": dq.DynamiQ.paper(),
    "all widths": dq.DynamiQ(
        bits=8.8125,
        widths=(0, *range(2, 17)),
        fractions=tuple((w, 1 / 16) for w in (*range(16, 1, -1), 0)),
    ),
    "groups of 8": dq.DynamiQ(bits=4.0, group_size=8, rounding="stratified", gap_ratio=1),
    "two classes": dq.DynamiQ(bits=5.0, widths=(3, 7), rounding="nearest"),
    "wide": dq.DynamiQ(bits=13.0, widths=(9, 16), group_size=16, rounding="independent"),
}
SLOW = ("all widths", "groups of 8", "wide")
every_method = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in METHODS],
)


def layout_of(name: str, rows_per_chunk: int = 37) -> Layout:
    return METHODS[name].layout(256 * NUM_CHUNKS * rows_per_chunk - 100, NUM_CHUNKS)


@functools.cache
def inputs(rows_per_chunk: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Rows with everything that is hard, in every class, and a table that scatters them."""
    rng = np.random.default_rng(0)
    count = NUM_CHUNKS * rows_per_chunk
    rows = rng.standard_t(4, (count, 256)) * np.exp2(4 * rng.standard_normal((count, 1)))
    rows[1] = 0
    rows[2, ::3] = 0
    rows[3] *= 1e-30
    rows[4, 7] = np.nan
    rows[5, 100] = np.inf
    rows[6] *= 1e-40  # subnormal
    rows[7, 0] = 2.0**127
    rows[8] = -rows[8, 0]
    order = rng.permutation(count).astype(np.int32).reshape(NUM_CHUNKS, -1)
    with np.errstate(over="ignore"):
        return np.asarray(jnp.asarray(rows, jnp.float32).astype(dtype)), order


def run(kernel: str, operation, *args, **kwargs):
    """One operation by a kernel that is interpreted, or by the XLA base."""
    jitted = jax.jit(functools.partial(operation, implementation=kernel, **kwargs))
    with without_gpu("interpret"):
        return jax.tree.map(np.asarray, jitted(*args))


@functools.cache
def path(kernel: str, name: str, dtype: str = "float32") -> list[np.ndarray]:
    """Messages of chunk 1: compressed, after a hop, and after one that receives both of them."""
    layout = layout_of(name)
    rows, order = inputs(layout.rows_per_chunk, dtype)
    args = rows, order, np.int32(1)
    sent = [run(kernel, compress, *args, np.int32(0), SEED, layout=layout)]
    sent.append(run(kernel, hop, sent[0][None], *args, np.int32(1), SEED, layout=layout))
    both = np.stack(sent)
    sent.append(run(kernel, hop, both, *args, np.int32(2), SEED, layout=layout))
    return sent


@kernels
@every_method
def test_messages_are_those_of_the_base(kernel, name):
    for ours, expected in zip(path(kernel, name), path("xla", name), strict=True):
        np.testing.assert_array_equal(ours, expected)


@kernels
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_narrow_gradients_are_read_as_they_are(kernel, dtype):
    for ours, expected in zip(
        path(kernel, "default", dtype), path("xla", "default", dtype), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)


@kernels
@every_method
def test_rows_come_back_where_they_were(kernel, name):
    layout = layout_of(name)
    _, order = inputs(layout.rows_per_chunk)
    messages = np.stack(path("xla", name))
    ours, expected = (run(k, decompress, messages, order, layout=layout) for k in (kernel, "xla"))
    np.testing.assert_array_equal(ours, expected)
    assert np.isnan(ours).any()
    assert np.isfinite(ours).mean() > 0.8


@kernels
@pytest.mark.parametrize("name", ("default", "paper"))
def test_sums_in_an_order_of_their_own_are_those_of_the_base(kernel, name):
    layout = layout_of(name)
    rows, order = inputs(layout.rows_per_chunk)

    def sum_and_values(messages, rows, order, implementation):
        codec = DynamiQChunks(
            rows=rows,
            order=order,
            seed=jnp.asarray(SEED),
            shift=None,
            layout=layout,
            implementation=implementation,
        )
        sums = codec.for_sums(8)
        payload = sums.hop(messages, jnp.int32(1), 2)
        return payload, sums.decompress(jnp.stack([payload] * NUM_CHUNKS))

    both = np.stack(path("xla", name)[:2])
    ours, expected = (run(k, sum_and_values, both, rows, order) for k in (kernel, "xla"))
    np.testing.assert_array_equal(ours[0], expected[0])
    np.testing.assert_array_equal(ours[1], expected[1])
    assert np.any(expected[0] != path("xla", name)[2])


@kernels
@pytest.mark.parametrize("name", ("paper", "two classes"))
def test_messages_are_added_to_the_local_rows(kernel, name):
    layout = layout_of(name)
    rows, order = inputs(layout.rows_per_chunk)
    both = np.stack(path("xla", name)[:2])
    ours, expected = (
        run(k, decompress_accumulate, both, rows, order, np.int32(1), layout=layout)
        for k in (kernel, "xla")
    )
    np.testing.assert_array_equal(ours, expected)
    # What a hop would have encoded: with 5 bits, within a few percent.
    finite = np.isfinite(ours)
    decoded = sum(run("xla", decompress, np.stack([m] * 3), order, layout=layout) for m in both)
    total = (decoded.astype(np.float64) + rows)[order[1]]
    np.testing.assert_allclose(ours[finite], total[finite], rtol=1e-5, atol=1e-30)


@kernels
@pytest.mark.parametrize("num_rows", (1, 16, 111))
def test_statistics_are_those_of_the_base(kernel, num_rows):
    rows = inputs(37)[0][:num_rows].copy()
    rows[-1] = 1e38  # its reciprocal is subnormal
    for ours, expected in zip(*(run(k, statistics, rows) for k in (kernel, "xla")), strict=True):
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(ours), finite)
        # The order of a sum is a backend's own.
        np.testing.assert_allclose(ours[finite], expected[finite], rtol=1e-5, atol=1e-6)


@kernels
def test_blocks_of_any_size_write_the_same_bytes(kernel):
    from pallas_kernels.hop.triton import hop as triton_hop
    from pallas_kernels.triton_launch import Config

    layout = layout_of("two classes")
    rows, order = inputs(layout.rows_per_chunk)
    args = rows, order, np.int32(1), np.int32(1), SEED
    received = path("xla", "two classes")[0][None]
    for config in (Config(rows=4, warps=2), Config(rows=64, warps=8)):
        ours = run(
            None,
            lambda *a, implementation, config=config: triton_hop(
                received, *a, layout=layout, config=config
            ),
            *args,
        )
        np.testing.assert_array_equal(ours, path("xla", "two classes")[1])


# ---------------------------------------------------------------- what a compiler for GPUs is given


def lower_for_gpu(function, *args) -> str:
    """Lowers for CUDA on a machine that has none."""
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@kernels
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("name", ("default", "paper", "all widths"))
def test_every_kernel_lowers_for_a_gpu(kernel, name, dtype, gpu_target):
    layout = layout_of(name, rows_per_chunk=1000)
    shape = jax.ShapeDtypeStruct
    rows = shape((layout.num_rows, 256), dtype)
    order = shape((NUM_CHUNKS, layout.rows_per_chunk), "int32")
    messages = shape((NUM_CHUNKS, layout.payload_bytes), "uint8")
    scalar, seed = shape((), "int32"), shape((2,), "uint32")
    bind = functools.partial(functools.partial, implementation=kernel)
    with without_gpu("compile"), gpu_target:
        texts = [
            lower_for_gpu(bind(compress, layout=layout), rows, order, scalar, scalar, seed),
            lower_for_gpu(bind(hop, layout=layout), messages, rows, order, scalar, scalar, seed),
            lower_for_gpu(bind(decompress, layout=layout), messages, order),
            lower_for_gpu(
                bind(decompress_accumulate, layout=layout), messages, rows, order, scalar
            ),
            lower_for_gpu(bind(statistics), rows),
        ]
    assert [text.count("custom_call @") for text in texts] == [1] * len(texts)


@pytest.fixture
def gpu_target():
    """What tells newer versions of JAX which GPU to lower for."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def count(jaxpr, primitive: str) -> int:
    """Calls of a primitive anywhere in a traced program."""
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


@kernels
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("bidirectional", (False, True))
def test_a_program_has_one_kernel_for_each_hop(data_mesh, kernel, bidirectional, check_vma):
    """Statistics, the first hop, the one in the loop, and the decoding: nothing else."""
    method = dataclasses.replace(METHODS["default"], implementation=None)

    def local(key, gradient):
        with without_gpu("compile"):
            ours = dataclasses.replace(method, implementation=kernel)
            topology = Ring(bidirectional=bidirectional)
            return dq.pmean(gradient[0], "data", key=key, method=ours, topology=topology)

    mapped = jax.shard_map(
        local, mesh=data_mesh(8), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    gradient = jax.ShapeDtypeStruct((8, 1 << 16), jnp.float32)
    traced = jax.jit(mapped).trace(jax.random.key(0), gradient)
    # A bidirectional ring has two of each, and the last step once more outside of the loop.
    expected = 1 + 2 + 4 + 1 if bidirectional else 1 + 1 + 1 + 1
    assert count(traced.jaxpr.jaxpr, "pallas_call") == expected


def test_a_backend_that_cannot_run_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(
        ValueError, match=r"implementation='triton' cannot run here: the default devices"
    ):
        dq.DynamiQ(implementation="triton")
    with without_gpu("compile"):
        dq.DynamiQ(implementation="triton")


def test_the_fastest_backend_is_chosen_for_the_platform(gpu_target):
    """Kernels where the program is for a GPU, and the base elsewhere, from one trace."""
    layout = layout_of("two classes")
    rows, order = inputs(layout.rows_per_chunk)
    with without_gpu("compile"), gpu_target:
        traced = jax.jit(lambda *a: compress(*a, layout=layout)).trace(
            rows, order, np.int32(0), np.int32(0), SEED
        )
        for platform, kernels_there in (("cuda", 1), ("cpu", 0)):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert text.count("triton") >= kernels_there
            assert ("triton" in text) == bool(kernels_there)
    assert implementation.interpreting() is False
