"""Leaves to buckets: each leaf once, in order, in buckets that are not too large."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamiq_jax.axes import Axes
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import buckets
from tests.support.gradients import of_workers
from tests.support.hlo import collectives
from tests.support.workers import TWO_CLASSES, simulated

KEY = jax.random.key(0)


def plan_of(leaves, bucket_bytes, *, workers=4):
    options = buckets.resolve_options("dynamiq", "ring", 1024, bucket_bytes)
    return buckets.plan(leaves, Axes("data", workers), options)


@given(
    sizes=st.lists(st.integers(1024, 40_000), min_size=1, max_size=12),
    dtypes=st.data(),
    bucket_bytes=st.integers(1, 200_000),
)
def test_every_leaf_is_in_one_bucket_of_its_dtype(sizes, dtypes, bucket_bytes):
    kinds = dtypes.draw(st.lists(st.sampled_from((jnp.float32, jnp.bfloat16)), min_size=12))
    leaves = [
        jax.ShapeDtypeStruct((size,), dtype) for size, dtype in zip(sizes, kinds, strict=False)
    ]
    plan = plan_of(leaves, bucket_bytes)
    assert plan.exact == ()
    assert sorted(i for bucket in plan.buckets for i in bucket.leaves) == list(range(len(leaves)))
    for bucket in plan.buckets:
        assert list(bucket.leaves) == sorted(bucket.leaves)
        assert {leaves[i].dtype for i in bucket.leaves} == {bucket.dtype}
        assert bucket.size == sum(leaves[i].size for i in bucket.leaves)
        assert len(bucket.leaves) == 1 or bucket.size * bucket.dtype.itemsize <= bucket_bytes
    # Not cut finer than it has to be: two neighbours of one dtype would not fit into one bucket.
    for dtype in (jnp.float32, jnp.bfloat16):
        same = [bucket for bucket in plan.buckets if bucket.dtype == dtype]
        for one, next_one in itertools.pairwise(same):
            first = leaves[next_one.leaves[0]].size
            assert (one.size + first) * one.dtype.itemsize > bucket_bytes - one.dtype.itemsize


def test_small_buckets_are_rings_of_their_own(data_mesh):
    tree = {name: jax.ShapeDtypeStruct((4, 8192), jnp.float32) for name in "abcd"}

    def compiled(bucket_bytes):
        def local(stacked):
            mine = jax.tree.map(lambda leaf: leaf[0], stacked)
            return dq.pmean(mine, "data", key=KEY, method=TWO_CLASSES, bucket_bytes=bucket_bytes)

        mapped = jax.shard_map(local, mesh=data_mesh(4), in_specs=P("data"), out_specs=P())
        return collectives(jax.jit(mapped).lower(tree).compile().as_text())

    leaf = jax.ShapeDtypeStruct((8192,), jnp.float32)
    for bucket_bytes, count in ((1, 4), (2 * 4 * 8192, 2), (1 << 30, 1)):
        found = compiled(bucket_bytes)
        assert sum(c.kind == "collective-permute" for c in found) == count
        leaves = dict.fromkeys(tree, leaf)
        report = dq.wire_report(leaves, 4, method=TWO_CLASSES, bucket_bytes=bucket_bytes)
        assert sum(c.sent_bytes(4) for c in found) == report.bytes_per_worker


def test_a_bucket_waits_for_those_of_later_leaves(data_mesh):
    """What one leaf needs: the transfers of all leaves behind it, and of none before it."""
    tree = {name: jax.ShapeDtypeStruct((2, 8192), jnp.bfloat16) for name in "abc"}

    def transfers_for(name):
        def local(stacked):
            mine = jax.tree.map(lambda leaf: leaf[0], stacked)
            return dq.pmean(mine, "data", key=KEY, method="exact", bucket_bytes=1)[name]

        mapped = jax.shard_map(local, mesh=data_mesh(2), in_specs=P("data"), out_specs=P())
        return len(collectives(jax.jit(mapped).lower(tree).compile().as_text()))

    last = transfers_for("c")
    assert last > 0
    assert [transfers_for(name) for name in "ab"] == [3 * last, 2 * last]


def test_a_bucket_does_not_wait_until_others_are_decoded(data_mesh):
    """Decoding them is dead code where only the last one is asked for: their transfers are not."""
    tree = {name: jax.ShapeDtypeStruct((2, 65_536), jnp.float32) for name in "abc"}

    def compiled(names):
        def local(stacked):
            mine = jax.tree.map(lambda leaf: leaf[0], stacked)
            mean = dq.pmean(
                mine, "data", key=KEY, method=TWO_CLASSES, topology="all_to_all", bucket_bytes=1
            )
            return [mean[name] for name in names]

        mapped = jax.shard_map(local, mesh=data_mesh(2), in_specs=P("data"), out_specs=P())
        text = jax.jit(mapped).lower(tree).compile().as_text()
        return len(collectives(text)), text.count(" while(")

    transfers, loops = compiled("abc")
    transfers_of_first, loops_of_first = compiled("a")
    assert transfers_of_first == transfers
    assert loops_of_first < loops


def test_buckets_have_rounding_noise_of_their_own():
    leaf = of_workers(0, 2, 4096)

    def local(key, tree):
        return dq.psum(tree, "data", key=key, method=TWO_CLASSES, bucket_bytes=1)

    result = simulated(local)(KEY, {"a": leaf, "b": leaf})
    assert np.any(result["a"] != result["b"])


@pytest.mark.parametrize("bucket_bytes", (0, -1, 1e6, True, None))
def test_bucket_bytes_that_are_not_bytes(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket_bytes={bucket_bytes!r} .* Give a positive int"):
        dq.wire_report({}, 2, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("exact_below", (-1, 1e3, float("inf"), True, "1024", None))
def test_exact_below_that_is_not_a_number_of_elements(exact_below):
    message = re.escape(f"exact_below={exact_below!r} is not a number of elements. Give 0 ")
    with pytest.raises(ValueError, match=message):
        dq.wire_report({}, 2, exact_below=exact_below)
    for collective in (dq.psum, dq.pmean, dq.psum_scatter, dq.all_gather):
        with pytest.raises(ValueError, match=message):
            simulated(lambda key, g, c=collective: c(g, "data", key=key, exact_below=exact_below))(
                KEY, of_workers(0, 2, 8192)
            )


def test_sizes_may_be_numpy_integers():
    few = jax.ShapeDtypeStruct((4096,), jnp.float32)
    report = dq.wire_report(few, 2, exact_below=np.int64(5000), bucket_bytes=np.int64(1 << 20))
    assert report.exact_leaves[0][1] == "4096 elements are fewer than exact_below=5000"
