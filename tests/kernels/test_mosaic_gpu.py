"""The Mosaic GPU kernels: interpreted, against the XLA base, and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from pallas_kernels import modes, operations
from pallas_kernels._jax import compat
from pallas_kernels.codec import Layout, LocalRows
from tests.support.kernel_cases import run, small_layout, some_messages, some_rows

pytestmark = pytest.mark.skipif(
    not compat.has_mosaic_gpu(), reason="the Mosaic GPU kernels need JAX 0.11 or newer"
)
slow = pytest.mark.slow

ALL_WIDTHS = tuple(range(2, 17))


@pytest.mark.parametrize(
    ("rows", "received", "dtype", "changes"),
    [
        (36, 1, "float32", {}),  # blocks of 16 rows that overlap, of several widths
        pytest.param(
            9,
            1,
            "bfloat16",
            {"widths": ALL_WIDTHS, "bits": 9, "group_size": 16, "rounding": "independent"},
            marks=slow,
        ),
        pytest.param(
            26,
            2,
            "float32",
            {"widths": (0, 9, 12), "bits": 9.7, "group_size": 8, "rounding": "independent"},
            marks=slow,
        ),
        pytest.param(
            3,
            1,
            "float16",
            {"bits": 6, "rounding": "nearest", "spacing": "geometric"},
            marks=slow,
        ),
        # Units that no row needs, for all programs to clear.
        pytest.param(200, 0, "float32", {"widths": (2,), "gap_ratio": 1}, marks=slow),
    ],
)
def test_a_hop_writes_the_bytes_of_the_base(rows, received, dtype, changes):
    layout, chunk = small_layout(rows, **changes), jnp.int32(1)
    args = some_messages(layout, dtype, 1, received), some_rows(layout, dtype, seed=9)
    ours, expected = (
        run(backend, operations.hop, *args, chunk, received, layout=layout)
        for backend in ("mosaic_gpu", "xla")
    )
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("rows", "received", "dtype", "changes"),
    [
        (36, 1, "float32", {}),
        pytest.param(7, 3, "bfloat16", {"widths": ALL_WIDTHS, "group_size": 16}, marks=slow),
        pytest.param(1, 2, "float16", {"bits": 4, "spacing": "geometric"}, marks=slow),
        pytest.param(
            12, 2, "float32", {"widths": (9, 16), "bits": 12, "group_size": 8}, marks=slow
        ),
    ],
)
def test_a_sum_is_that_of_the_base(rows, received, dtype, changes):
    layout, chunk = small_layout(rows, **changes), jnp.int32(1)
    local = some_rows(layout, dtype, seed=9)
    local = local._replace(rows=local.rows.at[local.places.order[1, 0], 5].set(jnp.nan))
    payloads = some_messages(layout, dtype, 1, received)
    ours, expected = (
        run(backend, operations.decompress_accumulate, payloads, local, chunk, layout=layout)
        for backend in ("mosaic_gpu", "xla")
    )
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True)
    # XLA contracts multiply-adds of the base, but not those of the interpreted kernel.
    np.testing.assert_allclose(ours / largest, expected / largest, rtol=0, atol=5e-7)
    assert np.argwhere(np.isnan(ours)).tolist() == [[0, 5]]


@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("rows", [1, 40])
def test_all_operations_lower_for_a_gpu(group_size, rows):
    from jax.sharding import AbstractDevice  # not in older versions

    layout = small_layout(rows, ALL_WIDTHS, group_size=group_size)
    payload, local = jnp.zeros((1, layout.payload_bytes), jnp.uint8), some_rows(layout)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    backend = {"implementation": "mosaic_gpu"}

    def all_operations(payload, local):
        sent = operations.hop(payload, local, 1, 1, layout=layout, **backend)
        received = jnp.stack([sent, sent])
        decoded = operations.decompress(received, local.places, layout=layout, **backend)
        added = operations.decompress_accumulate(received, local, 1, layout=layout, **backend)
        return sent, decoded, added, operations.statistics(local.rows, **backend)

    with modes.without_gpu("compile"), jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(all_operations).trace(payload, local)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 4


def all_chunks(local: LocalRows, *, layout: Layout, implementation: str):
    """Compress and decompress all chunks, and measure the norms."""
    options = {"layout": layout, "implementation": implementation}
    sent = [operations.compress(local, chunk, 0, **options) for chunk in range(layout.num_chunks)]
    decoded = operations.decompress(jnp.stack(sent), local.places, **options)
    return sent, decoded, operations.statistics(local.rows, implementation=implementation)


@slow
def test_the_other_operations_are_those_of_the_base():
    layout = small_layout(20)
    local = some_rows(layout, "bfloat16")
    local = local._replace(rows=local.rows.at[3, 7].set(jnp.inf).at[5, 0].set(jnp.nan))
    ours, expected = (
        run(backend, all_chunks, local, layout=layout) for backend in ("mosaic_gpu", "xla")
    )
    np.testing.assert_array_equal(ours[0], expected[0])
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-6)
    np.testing.assert_allclose(ours[2], expected[2], rtol=1e-6, atol=1e-6)
    # What is not finite shows in all of its row and nowhere else.
    assert np.flatnonzero(np.isnan(ours[1]).all(axis=1)).tolist() == [3, 5]
    assert np.isfinite(np.delete(ours[1], [3, 5], axis=0)).all()
    assert np.flatnonzero(~np.isfinite(ours[2])).tolist() == [3, 5]


def test_it_is_refused_where_it_cannot_run():
    with pytest.raises(ValueError, match="GPU"):
        operations.statistics(jnp.zeros((1, 256)), implementation="mosaic_gpu")
