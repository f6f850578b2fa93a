"""Sizes beyond 32 bits: each index fits, or the plan is cut, or it is refused with the limit."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.plan import Cuts, make_plan
from dynamiq_jax._core import MOST_IN_BUCKET, Axis
from dynamiq_jax._inputs.options import resolve
from dynamiq_jax.topologies import AllToAll
from pallas_kernels import operations
from pallas_kernels.codec import LocalRows, Places
from tests.support.indices import too_large
from tests.support.machine import needs_memory

KEY = jax.random.key(0)
WORKERS = 4
INT32 = 2**31 - 1
BORDERS = (2**31 - 1, 2**31, 2**32 + 1)
# Numbers of coordinates: as many as the borders, as many bytes of float32, as many bits of codes.
SIZES = [count // per for per in (1, 4, 16) for count in BORDERS]
LARGEST = BORDERS[-1]


def leaf(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(data_mesh, collective, *leaves, **choices):
    """Jaxpr of a collective of local leaves, none of which takes memory."""

    def local(*leaves):
        return collective(leaves, "data", key=KEY, **choices)

    mapped = jax.shard_map(
        local, mesh=data_mesh(WORKERS), in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.make_jaxpr(mapped)(*leaves)


# ------------------------------------------------------------------------------------------ plans


def plan_of(leaves, axes, method="dynamiq", topology="ring", cuts=None, **options):
    arguments = resolve(method, topology, dq.Options(**options))
    methods = arguments.policy.methods(leaves)
    return make_plan(leaves, axes, arguments, methods, cuts=cuts)


@given(
    shape=st.sampled_from(SIZES).map(lambda size: (size,))
    | st.tuples(st.sampled_from((1, 2, 3, 5000)), st.integers(1, 2**34))
    | st.tuples(st.integers(2**20, 2**34)),
    others=st.lists(st.integers(1024, 2**31), max_size=3),
    dtype=st.sampled_from((jnp.bfloat16, jnp.float32, jnp.float8_e5m2)),
    method=st.sampled_from(("dynamiq", "dynamiq:16", "exact", "bf16", "mxfp8", "topk_chunked")),
    topology=st.sampled_from(("ring", "all_to_all")),
    fast=st.sampled_from((1, 2, 8)),
    cuts=st.builds(Cuts, st.sampled_from(("auto", "striped", "in_order")), st.booleans()),
    bucket_bytes=st.sampled_from((2**20, 2**27, MOST_IN_BUCKET)),
    workers=st.sampled_from((2, 3, 64, 65_536)),
)
def test_a_bucket_of_any_plan_can_be_indexed(
    shape, others, dtype, method, topology, fast, cuts, bucket_bytes, workers
):
    leaves = [leaf(*shape, dtype=dtype), *(leaf(size, dtype=dtype) for size in others)]
    axes = Axes(Axis("data", workers), (Axis("local", fast),) if fast > 1 else ())
    plan = plan_of(leaves, axes, method, topology, cuts, bucket_bytes=bucket_bytes)
    for bucket in plan.buckets:
        call = bucket.call
        padded = bucket.size + 512 * call.num_chunks * fast
        assert padded <= INT32
        assert call.num_chunks * (bucket.cost.payload_bytes + 512 * 4) <= INT32
    exact = {index for index, _ in plan.exact}
    striped = {b.leaves: b.stripe.count * b.size for b in plan.buckets if b.stripe is not None}
    covered = sum(striped.values()) + sum(b.size for b in plan.buckets if b.stripe is None)
    wanted = sum(each.size for index, each in enumerate(leaves) if index not in exact)
    rows = 256 * sum(b.stripe is not None for b in plan.buckets)
    assert wanted <= covered <= wanted + rows


@pytest.mark.parametrize("size", BORDERS)
def test_a_leaf_of_parts_that_are_too_large_is_cut_into_stripes(size):
    """In order, `all_gather` and fast axes send whole leaves, as long as these fit."""
    axes, whole = Axes(Axis("data", WORKERS)), Cuts("in_order", into_parts=False)
    (one,) = plan_of([leaf(MOST_IN_BUCKET)], axes, cuts=whole).buckets
    assert one.stripe is None
    several = plan_of([leaf(size), leaf(4096)], axes, cuts=whole).buckets
    assert [bucket.leaves for bucket in several if bucket.stripe is None] == [(1,)]
    assert {bucket.leaves for bucket in several if bucket.stripe is not None} == {(0,)}
    hierarchy = Axes(Axis("hosts", 2), (Axis("local", 2),))
    parts = plan_of([leaf(1, size)], hierarchy, bucketing="in_order").buckets
    assert all(bucket.stripe is not None for bucket in parts)


@pytest.mark.parametrize(
    ("call", "name", "reason"),
    [
        (
            lambda: dq.wire_report({"w": leaf(2, LARGEST)}, WORKERS, method="powersgd"),
            "tree['w'] has 8,589,934,594 coordinates",
            "method=PowerSGD(",
        ),
        (
            lambda: jax.eval_shape(
                lambda: dq.encode({"w": jnp.zeros((LARGEST,), jnp.bfloat16)}, key=KEY)
            ),
            "",
            "",
        ),
    ][:1],
)
def test_a_leaf_that_cannot_be_cut_is_refused(call, name, reason):
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        call()
    for part in (reason, "1,879,048,192", "Cut the leaf"):
        assert part in str(error.value)


@pytest.mark.parametrize("size", (MOST_IN_BUCKET + 1, *BORDERS, 2**40))
def test_buckets_beyond_the_limit_are_no_option(size):
    with pytest.raises(ValueError, match=f"bucket_bytes={size} .* from 1 to {MOST_IN_BUCKET}"):
        dq.Options(bucket_bytes=size)


@pytest.mark.parametrize("method", ("dynamiq", "bf16", "mxfp8", "exact"))
@pytest.mark.parametrize("workers", (2, (2, 4)))
def test_the_report_counts_beyond_32_bits(method, workers):
    """Bytes of a hundred leaves are a hundred times those of one."""
    counts = [
        dq.wire_report([leaf(2**14, 2**12)] * number, workers, method=method)
        for number in (4, 400)
    ]
    assert counts[1].bytes_per_worker > 2**32
    assert counts[1].bytes_per_worker == pytest.approx(100 * counts[0].bytes_per_worker, rel=1e-3)


# --------------------------------------------------------------------------------------- programs


COLLECTIVES = {
    "pmean": lambda size: (dq.pmean, leaf(size)),
    "pmean of rows": lambda size: (dq.pmean, leaf(3, size // 3)),
    "psum_scatter": lambda size: (
        functools.partial(dq.psum_scatter, tiled=True),
        leaf(WORKERS, size // WORKERS),
    ),
    "all_gather": lambda size: (functools.partial(dq.all_gather, tiled=True), leaf(size)),
}


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_program_has_an_index_beyond_32_bits(data_mesh, name, topology):
    collective, large = COLLECTIVES[name](LARGEST)
    options = dq.Options(bucket_bytes=MOST_IN_BUCKET, unrolled_buckets=1)
    jaxpr = traced(data_mesh, collective, large, topology=topology, options=options)
    assert too_large(jaxpr) == []
