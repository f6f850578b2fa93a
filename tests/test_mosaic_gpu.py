"""The Mosaic GPU kernels: interpreted, against the XLA base, and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from dynamiq_jax import compat
from pallas_kernels import implementation
from pallas_kernels.codec.layout import Layout, make_layout
from pallas_kernels.operations import compress, decompress, decompress_accumulate, hop, statistics

pytestmark = pytest.mark.skipif(not compat.has_mosaic_gpu(), reason="this JAX has no such backend")

SEED = np.array([123456789, 987654321], np.uint32)


def small_layout(rows: int, widths: tuple[int, ...] = (5, 2), **changes) -> Layout:
    """Two chunks of `rows` rows, the same number of rows of each width."""
    arguments = {
        "group_size": 32,
        "spacing": "quadratic",
        "gap_ratio": 2.7,
        "rounding": "correlated",
        **changes,
    }
    fractions = tuple((width, 1 / len(widths)) for width in widths)
    return make_layout(2 * rows * 256, 2, fractions=fractions, **arguments)


def some_rows(layout: Layout, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(layout.num_rows, 256)) * np.exp(
        3 * rng.normal(size=(layout.num_rows, 1))
    )
    return jnp.asarray(rows.astype(np.float32)).astype(dtype)


def some_order(layout: Layout) -> np.ndarray:
    order = np.random.default_rng(1).permutation(layout.num_rows)
    return order.reshape(layout.num_chunks, -1).astype(np.int32)


def some_messages(layout: Layout, dtype, chunk: jax.Array, count: int) -> jax.Array:
    """What as many other workers would send of a chunk."""
    order, options = some_order(layout), {"layout": layout, "implementation": "xla"}
    sent = [
        compress(some_rows(layout, dtype, seed), order, chunk, 0, SEED, **options)
        for seed in range(count)
    ]
    return jnp.stack(sent)


@pytest.mark.parametrize(
    ("rows", "received", "dtype", "changes"),
    [
        (36, 1, jnp.float32, {}),  # blocks of 16 rows that overlap
        pytest.param(
            9,
            1,
            jnp.bfloat16,
            {"widths": (7, 3, 0), "group_size": 16, "rounding": "stratified"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            12,
            2,
            jnp.float32,
            {"widths": (16, 9), "group_size": 8, "rounding": "independent"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            3,
            1,
            jnp.float16,
            {"widths": (8, 6, 4), "rounding": "nearest", "spacing": "geometric"},
            marks=pytest.mark.slow,
        ),
        pytest.param(40, 1, jnp.float32, {"widths": (13,), "gap_ratio": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_hop_is_byte_for_byte_the_base(rows, received, dtype, changes):
    layout = small_layout(rows, **changes)
    order, chunk = some_order(layout), jnp.int32(1)
    payloads = some_messages(layout, dtype, chunk, received)

    def run(backend):
        return jax.jit(
            lambda payloads, rows: hop(
                payloads, rows, order, chunk, received, SEED, layout=layout, implementation=backend
            )
        )(payloads, some_rows(layout, dtype, seed=9))

    with implementation.without_gpu("interpret"):
        actual = run("mosaic_gpu")
    np.testing.assert_array_equal(actual, run("xla"))


@pytest.mark.parametrize(
    ("rows", "received", "dtype", "error", "changes"),
    [
        (36, 1, jnp.float32, 0, {}),
        pytest.param(
            7, 3, jnp.bfloat16, 0, {"widths": (7, 3, 0), "group_size": 16}, marks=pytest.mark.slow
        ),
        pytest.param(
            1, 2, jnp.float16, 0, {"widths": (4,), "spacing": "geometric"}, marks=pytest.mark.slow
        ),
        # XLA contracts multiply-adds of the base here, but not those of the interpreted kernel.
        pytest.param(
            12, 2, jnp.float32, 2e-7, {"widths": (16, 9), "group_size": 8}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_sum_is_that_of_the_base(rows, received, dtype, error, changes):
    layout = small_layout(rows, **changes)
    order, chunk = some_order(layout), jnp.int32(1)
    payloads = some_messages(layout, dtype, chunk, received)
    local = some_rows(layout, dtype, seed=9).at[order[1, 0], 5].set(jnp.nan)

    def run(backend):
        options = {"layout": layout, "implementation": backend}
        return jax.jit(lambda *a: decompress_accumulate(*a, order, chunk, **options))(
            payloads, local
        )

    with implementation.without_gpu("interpret"):
        actual = run("mosaic_gpu")
    expected = run("xla")
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True)
    np.testing.assert_allclose(actual / largest, expected / largest, rtol=0, atol=error)
    assert np.argwhere(np.isnan(actual)).tolist() == [[0, 5]]


@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("rows", [1, 40])
def test_every_width_lowers_for_a_gpu(group_size, rows):
    from jax.sharding import AbstractDevice  # not in older versions

    widths = (16, 11, 7, 0) if rows > 1 else (5,)
    layout = small_layout(rows, widths, group_size=group_size, rounding="stratified")
    order, rows_of_bucket = some_order(layout), some_rows(layout)
    payload = jnp.zeros((1, layout.payload_bytes), jnp.uint8)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)

    def run(payload, rows):
        backend = "mosaic_gpu"
        sent = hop(payload, rows, order, 1, 1, SEED, layout=layout, implementation=backend)
        received = jnp.stack([sent, sent])
        decoded = decompress(received, order, layout=layout, implementation=backend)
        added = decompress_accumulate(
            received, rows, order, 1, layout=layout, implementation=backend
        )
        return sent, decoded, added, statistics(rows, implementation=backend)

    with implementation.without_gpu("compile"), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(payload, rows_of_bucket)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 4


@pytest.mark.slow
def test_the_other_operations_are_the_base():
    layout = small_layout(20)
    rows, order = some_rows(layout, jnp.bfloat16), some_order(layout)

    def run(backend):
        sent = [
            compress(rows, order, chunk, 0, SEED, layout=layout, implementation=backend)
            for chunk in range(layout.num_chunks)
        ]
        decoded = decompress(jnp.stack(sent), order, layout=layout, implementation=backend)
        return sent, decoded, statistics(rows, implementation=backend)

    with implementation.without_gpu("interpret"):
        sent, decoded, measured = jax.jit(lambda: run("mosaic_gpu"))()
    expected_sent, expected_decoded, expected_measured = jax.jit(lambda: run("xla"))()
    np.testing.assert_array_equal(sent, expected_sent)
    np.testing.assert_array_equal(decoded, expected_decoded)
    for actual, expected in zip(measured, expected_measured, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_not_finite_rows_decode_to_nan():
    layout = small_layout(4)
    rows, order = some_rows(layout).at[3, 7].set(jnp.inf).at[5, 0].set(jnp.nan), some_order(layout)
    with implementation.without_gpu("interpret"):
        sent = [
            compress(rows, order, chunk, 0, SEED, layout=layout, implementation="mosaic_gpu")
            for chunk in range(layout.num_chunks)
        ]
        backend = "mosaic_gpu"
        decoded = decompress(jnp.stack(sent), order, layout=layout, implementation=backend)
    assert np.flatnonzero(np.isnan(decoded).all(axis=1)).tolist() == [3, 5]
    assert np.isfinite(np.delete(np.asarray(decoded), [3, 5], axis=0)).all()


def test_it_is_refused_where_it_cannot_run():
    with pytest.raises(ValueError, match="GPU"):
        statistics(jnp.zeros((1, 256)), implementation="mosaic_gpu")
