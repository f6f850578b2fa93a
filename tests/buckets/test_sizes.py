"""Sizes beyond 32 bits: each index fits, or the plan is cut, or it is refused with the limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import islands
from dynamiq_jax._buckets import buckets as sorting
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import CutRules
from dynamiq_jax._core import MOST_IN_BUCKET, Axis
from dynamiq_jax.topologies import _all_to_all
from tests.support.buckets import plan_of
from tests.support.gradients import of_workers
from tests.support.indices import too_large
from tests.support.workers import STOCHASTIC, OfShapes, simulated, tiled

KEY = jax.random.key(0)
WORKERS = 4
INT32 = 2**31 - 1
BORDERS = (2**31 - 1, 2**31, 2**32 + 1)
# Numbers of coordinates: as many as the borders, as many bytes of float32, as many bits of codes.
SIZES = [count // per for per in (1, 4, 16) for count in BORDERS]
LARGEST = BORDERS[-1]
HIERARCHY = Axes(Axis("hosts", 2), (Axis("local", 2),))


def leaf(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


# ------------------------------------------------------------------------------------------ plans


@given(
    shape=st.sampled_from(SIZES).map(lambda size: (size,))
    | st.tuples(st.sampled_from((1, 2, 3, 5000)), st.integers(1, 2**34))
    | st.tuples(st.integers(2**20, 2**34)),
    others=st.lists(st.integers(1024, 2**31), max_size=3),
    dtype=st.sampled_from((jnp.bfloat16, jnp.float32, jnp.float8_e5m2)),
    method=st.sampled_from(("dynamiq", "dynamiq:16", "exact", "bf16", "mxfp8")),
    topology=st.sampled_from(("ring", "all_to_all")),
    fast=st.sampled_from((1, 2, 8)),
    rules=st.builds(CutRules, st.sampled_from(("auto", "striped", "in_order")), st.booleans()),
    bucket_bytes=st.sampled_from((2**20, 2**27, MOST_IN_BUCKET)),
    workers=st.sampled_from((2, 3, 64, 65_536)),
)
def test_a_bucket_of_any_plan_can_be_indexed(
    shape, others, dtype, method, topology, fast, rules, bucket_bytes, workers
):
    leaves = [leaf(*shape, dtype=dtype), *(leaf(size, dtype=dtype) for size in others)]
    axes = Axes(Axis("data", workers), (Axis("local", fast),) if fast > 1 else ())
    choices = {"method": method, "topology": topology, "bucket_bytes": bucket_bytes}
    planned = plan_of(leaves, axes, rules=rules, **choices)
    buckets = planned.buckets
    for bucket in buckets:
        call = bucket.call
        padded = bucket.size + 512 * call.num_chunks * fast
        assert padded <= INT32
        assert call.num_chunks * (bucket.cost.payload_bytes + 512 * 4) <= INT32
    exact = {index for index, _ in planned.exact}
    wanted = sum(each.size for index, each in enumerate(leaves) if index not in exact)
    padding = 256 * sum(bucket.stripe is not None for bucket in buckets)
    assert wanted <= sum(bucket.size for bucket in buckets) <= wanted + padding


@pytest.mark.parametrize("size", BORDERS)
def test_a_leaf_of_parts_that_are_too_large_is_cut_into_stripes(size):
    """In order, `all_gather` and fast axes send whole leaves, as long as these fit."""
    axes, whole = Axes(Axis("data", WORKERS)), CutRules("in_order", into_parts=False)
    (one,) = plan_of([leaf(MOST_IN_BUCKET)], axes, rules=whole).buckets
    assert one.stripe is None
    several = plan_of([leaf(size), leaf(4096)], axes, rules=whole).buckets
    assert [bucket.leaves for bucket in several if bucket.stripe is None] == [(1,)]
    assert {bucket.leaves for bucket in several if bucket.stripe is not None} == {(0,)}
    parts = plan_of([leaf(1, size)], HIERARCHY, bucketing="in_order").buckets
    assert all(bucket.stripe is not None for bucket in parts)


@pytest.mark.parametrize("size", BORDERS)
def test_a_leaf_that_cannot_be_cut_is_refused(size):
    parts = (f"tree['w'] has {2 * size:,} coordinates", "method=OfShapes(", "1,879,048,192")
    with pytest.raises(ValueError) as error:
        dq.wire_report({"w": leaf(2, size), "b": leaf(4096)}, WORKERS, method=OfShapes())
    for part in (*parts, "int32", "Cut the leaf"):
        assert part in str(error.value)


def test_a_message_refuses_a_leaf_that_is_larger_than_a_bucket(monkeypatch):
    """Of the two workers that its buckets count, a program holds only one."""
    monkeypatch.setattr(sorting, "MOST_IN_BUCKET", 2**16)
    fits, other = np.ones(2**16, np.float32), np.ones(2**16 + 1, np.float32)
    assert (
        islands.encode({"w": fits}, key=KEY, method=dq.Compression(bucket_bytes=1)).nbytes > 2**14
    )
    with pytest.raises(ValueError, match=r"tree\['w'\] has 65,537 coordinates"):
        islands.encode({"w": other}, key=KEY)


@pytest.mark.parametrize("size", (MOST_IN_BUCKET + 1, *BORDERS, 2**40))
def test_buckets_beyond_the_limit_are_no_option(size):
    with pytest.raises(ValueError, match=f"bucket_bytes={size} .* from 1 to {MOST_IN_BUCKET}"):
        dq.Compression(bucket_bytes=size)


@pytest.mark.parametrize("method", ("dynamiq", "bf16", "mxfp8", "exact"))
@pytest.mark.parametrize("workers", (2, (2, 4)))
def test_the_report_counts_beyond_32_bits(method, workers):
    """Bytes of a hundred leaves are a hundred times those of one."""
    choice = dq.Compression(method, bucket_bytes=MOST_IN_BUCKET)
    one, many = (
        dq.wire_report([leaf(2**14, 2**15)] * number, workers, choice) for number in (1, 100)
    )
    assert many.bytes_per_worker > 2**32
    assert many.bytes_per_worker == pytest.approx(100 * one.bytes_per_worker, rel=1e-3)


# --------------------------------------------------------------------------------------- programs


COLLECTIVES = {
    "pmean": (dq.pmean, leaf(LARGEST)),
    "pmean of rows": (dq.pmean, leaf(3, LARGEST // 3)),
    "psum_scatter": (tiled(dq.psum_scatter), leaf(WORKERS, LARGEST // WORKERS)),
    "all_gather": (tiled(dq.all_gather), leaf(LARGEST)),
}


def indexed_too_far(collective, large, mesh, **choices):
    """Operations of a program that index beyond 32 bits; it takes no memory."""
    names = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]

    def local(leaf):
        return collective(leaf, names, key=KEY, **choices)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return too_large(jax.make_jaxpr(mapped)(large))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("bucket_bytes", (2**27, MOST_IN_BUCKET))
def test_no_program_has_an_index_beyond_32_bits(data_mesh, name, topology, bucket_bytes):
    method = dq.Compression(topology=topology, bucket_bytes=bucket_bytes, unrolled_buckets=1)
    assert indexed_too_far(*COLLECTIVES[name], data_mesh(WORKERS), method=method) == []


@pytest.mark.parametrize("method", ("exact", "bf16", "mxfp8", "dynamiq:16", "ef+blockint"))
@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_the_largest_bucket_has_no_index_beyond_32_bits(data_mesh, method, topology):
    axes, dtype = Axes(Axis("data", WORKERS)), jnp.float8_e5m2  # a byte each: the most coordinates
    choices = {"method": method, "topology": topology, "bucket_bytes": MOST_IN_BUCKET}
    bucket = plan_of([leaf(MOST_IN_BUCKET, dtype=dtype)], axes, **choices).buckets[0]
    call, chosen = bucket.call, bucket.method
    sent = call.num_chunks * bucket.cost.payload_bytes
    assert max(bucket.size, sent) > 0.49 * MOST_IN_BUCKET

    def all_reduce(flat, name, key):
        return chosen.all_reduce(flat, call, key, chosen.init_state(call)).total

    flat = leaf(bucket.size)
    assert indexed_too_far(all_reduce, flat, data_mesh(WORKERS)) == []


@pytest.mark.parametrize(
    ("shape", "options"),
    (
        ((2, 2), {"bucketing": "striped"}),
        ((2, 2), {"bucketing": "in_order"}),
        ((WORKERS,), {"max_error": 0.1}),
    ),
    ids=("striped", "in order", "estimate"),
)
def test_no_hierarchy_or_estimate_has_an_index_beyond_32_bits(shape, options):
    names = ("hosts", "local")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    method = dq.Compression(bucket_bytes=MOST_IN_BUCKET, **options)
    assert indexed_too_far(dq.pmean, leaf(LARGEST), mesh, method=method) == []


def test_no_gradient_of_a_loss_has_an_index_beyond_32_bits(data_mesh):
    def loss(w, x):
        return jnp.mean(x[:, None] * w.astype(jnp.float32)[None])

    mesh = data_mesh(WORKERS)
    in_specs = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = dq.compress(jax.grad(loss), "data", in_specs=in_specs)
    large, batch = leaf(LARGEST), leaf(WORKERS, dtype=jnp.float32)
    assert too_large(jax.make_jaxpr(step)(large, batch)) == []


def test_an_index_beyond_32_bits_is_found():
    def program(values, at):
        def body(_, values):
            row = jax.lax.dynamic_index_in_dim(values, at)
            return jax.lax.dynamic_update_index_in_dim(values, row, 0, 0)

        return jax.lax.fori_loop(0, 2, body, values)

    for shape, faults in (((2**31 - 1, 2), 0), ((2, 2**31), 0), ((2**31, 2), 2)):
        jaxpr = jax.make_jaxpr(program)(leaf(*shape), np.int32(1))
        assert len(too_large(jaxpr)) == faults


# ---------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("name", ("psum_scatter", "all_gather"))
def test_results_of_stripes_in_place_of_a_large_leaf_are_those_of_the_leaf(monkeypatch, name):
    monkeypatch.setattr(sorting, "MOST_IN_BUCKET", 2**17)
    collective, _ = COLLECTIVES[name]
    tree = {"w": of_workers(0, 2, 3 * 2**17).reshape(2, 2, -1), "b": of_workers(1, 2, 2048)}

    def results(method):
        choice = dq.Compression(method, bucketing="in_order")
        run = simulated(lambda key, tree: collective(tree, "data", choice, key=key))
        return jax.tree.map(np.asarray, run(KEY, tree))

    for found, wanted in zip(
        jax.tree.leaves(results(STOCHASTIC)), jax.tree.leaves(results("exact")), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())


def test_an_all_to_all_counts_rows_where_a_vector_is_too_long(monkeypatch):
    values = of_workers(0, WORKERS, 4096)

    def mean():
        run = simulated(
            lambda key, values: dq.pmean(values, "data", key=key, method="bf16:all_to_all")
        )
        return np.asarray(run(KEY, values))

    by_place = mean()
    monkeypatch.setattr(_all_to_all, "_LARGEST_INDEX", 0)
    np.testing.assert_array_equal(mean(), by_place)
