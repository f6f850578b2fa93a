"""Striped buckets: each has a like share of every leaf, so that several are as good as one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._buckets.dealing import number_of_stripes
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring
from tests.support.buckets import plan_of
from tests.support.gradients import heavy_tailed, of_workers, vnmse
from tests.support.hlo import collectives
from tests.support.states import of_buckets
from tests.support.workers import STOCHASTIC, OfShapes, mesh_of, on_mesh, simulated

KEY = jax.random.key(3)
striped = functools.partial(dq.Compression, bucketing="striped", exact_below=0)
LEAF = 2**16  # the smallest bucket that leaves are cut for
SCALES = {"a": 1.0, "b": 0.1, "c": 0.03, "d": 0.01}


def regions(num_workers, size=LEAF):
    """Leaves whose magnitudes differ by far, as those of an embedding and of layers do."""
    return {
        name: np.float32(scale) * of_workers(seed, num_workers, size)
        for seed, (name, scale) in enumerate(SCALES.items())
    }


def error_of(tree, method="dynamiq"):
    """vNMSE of the mean of a stacked tree, over all of its leaves."""
    run = simulated(lambda key, tree: dq.pmean(tree, "data", method, key=key))
    found = jax.tree.map(lambda leaf: leaf[0], run(KEY, tree))
    flat = [
        np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(t)])
        for t in (jax.tree.map(np.asarray, found), jax.tree.map(lambda leaf: leaf.mean(0), tree))
    ]
    return vnmse(*flat)


# ----------------------------------------------------------------------------------------- numbers


@given(
    fewest=st.integers(1, 40),
    shapes=st.lists(
        st.sampled_from(((5000,), (64, 576), (32, 1024), (16, 4096), (9, 3584))), max_size=4
    ),
)
def test_no_stripe_has_the_same_columns_of_all_rows(fewest, shapes):
    count = number_of_stripes(fewest, shapes)
    assert fewest <= count < fewest + 32
    for width in {shape[-1] for shape in shapes if len(shape) > 1 and count > 1}:
        starts = 256 * np.arange(count * width) % width  # of the rows of 256
        assert set(starts[::count]) == set(starts), "the first stripe lacks columns of the leaf"


# ------------------------------------------------------------------------------------------ plans


def plan_of_sizes(sizes, **choices):
    return plan_of([jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes], **choices)


@given(
    sizes=st.lists(st.integers(1024, 500_000), min_size=1, max_size=6),
    bucket_bytes=st.integers(4 * LEAF, 2**21),
)
def test_buckets_are_alike_and_hardly_larger_than_asked_for(sizes, bucket_bytes):
    plan = plan_of_sizes(sizes, bucket_bytes=bucket_bytes)
    assert not plan.exact
    assert {bucket.leaves for bucket in plan.buckets} == {tuple(range(len(sizes)))}
    (size,) = {bucket.size for bucket in plan.buckets}
    count = len(plan.buckets)
    assert 4 * (size - 256) <= bucket_bytes
    assert sum(sizes) <= size * count < sum(sizes) + 256 * count
    assert count == -(-4 * sum(sizes) // bucket_bytes)
    if count > 1:
        assert [bucket.stripe.number for bucket in plan.buckets] == list(range(count))
        assert len({bucket.program for bucket in plan.buckets}) == 1
    else:
        assert plan.buckets[0].stripe is None


@pytest.mark.parametrize(
    ("topology", "is_striped"),
    ((Ring(), True), (Ring(unroll=True), False), (AllToAll(), False), (Butterfly(), False)),
)
def test_buckets_are_striped_where_nothing_runs_under_a_loop(topology, is_striped):
    """Unless the user says otherwise."""

    def stripes(bucketing):
        options = {"bucket_bytes": 4 * LEAF, "bucketing": bucketing}
        plan = plan_of_sizes((2 * LEAF, 2 * LEAF), topology=topology, **options)
        assert len(plan.buckets) == 4
        return {bucket.stripe is not None for bucket in plan.buckets}

    assert stripes("auto") == {is_striped}
    assert stripes("striped") == {True}
    assert stripes("in_order") == {False}


def test_buckets_are_in_order_on_tpus(monkeypatch):
    """Where XLA takes longer to deal rows than kernels take for the codec."""

    def plan(bucketing, size=2 * LEAF):
        options = {"bucket_bytes": 4 * LEAF, "bucketing": bucketing}
        return plan_of_sizes((size, size), topology=Ring(), **options)

    elsewhere = plan("in_order"), plan("striped"), plan("auto", LEAF // 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert plan("auto") == plan("in_order") == elsewhere[0]
    assert plan("striped") == elsewhere[1] != elsewhere[0]
    one = plan("auto", LEAF // 2)  # all leaves fit into one bucket
    assert one == elsewhere[2] and [bucket.leaves for bucket in one.buckets] == [(0, 1)]


def test_changes_of_local_sgd_are_striped_on_every_topology():
    """All of a change is there when it is sent. Gradients in an all-to-all leave in order."""
    params = {name: jax.ShapeDtypeStruct((2 * LEAF,), jnp.float32) for name in "ab"}
    arguments = {"method": dq.Compression(topology="all_to_all", bucket_bytes=4 * LEAF)}
    (report,) = dq.training.LocalSGD(axis_name="data", every=2, **arguments).wire_report(params, 4)
    assert [leaf.buckets for leaf in report.leaves] == [(0, 1, 2, 3)] * 2
    of_gradients = dq.wire_report(params, 4, **arguments)
    assert [leaf.buckets for leaf in of_gradients.leaves] == [(0, 1), (2, 3)]


def test_methods_that_use_shapes_take_leaves_as_they_are():
    choices = {"method": OfShapes(), "bucket_bytes": 1, "bucketing": "striped"}
    plan = plan_of_sizes((4 * LEAF, 4 * LEAF), **choices)
    assert all(bucket.stripe is None for bucket in plan.buckets)


def test_leaves_of_other_methods_or_dtypes_are_stripes_of_their_own():
    leaves = [jax.ShapeDtypeStruct((2 * LEAF,), dtype) for dtype in (jnp.float32, jnp.bfloat16) * 2]
    policy = {"3": "dynamiq:4", ".*": "dynamiq"}
    plan = plan_of(leaves, method=policy, bucket_bytes=4 * LEAF)
    # One bucket holds all of a leaf of 2-byte numbers.
    assert [bucket.leaves for bucket in plan.buckets] == [(0, 2)] * 4 + [(1,), (3,)]


def test_what_is_no_choice_is_an_error():
    with pytest.raises(ValueError, match=re.escape("bucketing='stripes' is not possible")):
        dq.Compression(bucketing="stripes")


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("num_workers", "bits"), ((2, 5.0), pytest.param(8, 3.0, marks=pytest.mark.slow))
)
@pytest.mark.slow
def test_several_stripes_are_as_good_as_one_bucket(num_workers, bits):
    """And better by far than buckets of one leaf each, which have the same bytes."""
    tree, method = regions(num_workers), dq.DynamiQ(bits=bits)
    one = error_of(tree, method)
    several = error_of(tree, striped(method, bucket_bytes=4 * LEAF))
    in_order = dq.Compression(method, bucket_bytes=4 * LEAF, bucketing="in_order")
    # At most 1.01 with 16 times as many coordinates: a chunk has 32 rows here.
    assert 0.95 * one < several < 1.1 * one
    assert error_of(tree, in_order) > 5 * one


def test_columns_of_other_magnitudes_are_shared_out_as_well():
    """Four stripes of a matrix of 1024 columns would each have a quarter of the columns."""
    rows = heavy_tailed(0, (4, 256, 4, 256))
    leaf = rows * np.array([1, 0.1, 0.03, 0.01], np.float32)[:, None]
    tree = leaf.reshape(4, 256, 1024)
    method = dq.DynamiQ(widths=(2, 4, 8))
    one = error_of(tree, method)
    assert 0.8 * one < error_of(tree, striped(method, bucket_bytes=4 * LEAF)) < 1.05 * one


def test_stripes_have_rounding_noise_of_their_own():
    leaf = np.tile(of_workers(0, 2, 256), (1, 2 * LEAF // 256))

    def local(key, leaf):
        return dq.pmean(leaf, "data", striped(STOCHASTIC, bucket_bytes=4 * LEAF), key=key)

    rows = np.asarray(simulated(local)(KEY, leaf))[0].reshape(-1, 2, LEAF // 2**8 // 2, 256)
    first, second = rows.reshape(-1, 2, 256)[:, 0], rows.reshape(-1, 2, 256)[:, 1]
    assert np.mean(first != second) > 0.1


# --------------------------------------------------------------------------- results and programs


def test_replicas_of_bfloat16_are_identical_and_in_place(data_mesh):
    dtype = jnp.bfloat16
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), regions(4))
    tree["small"] = jnp.ones((4, 7, 11), dtype)

    def local(key, tree):
        return dq.pmean(tree, "data", striped("bf16", bucket_bytes=4 * LEAF), key=key)

    found = on_mesh(local, data_mesh(4), check_vma=False)(KEY, tree)
    for name, leaf in found.items():
        assert (leaf.shape, leaf.dtype) == (tree[name].shape, dtype)
        leaf = np.asarray(leaf, np.float32)
        for other in leaf[1:]:
            np.testing.assert_array_equal(other, leaf[0])
        assert 1e-8 < vnmse(leaf[0], np.asarray(tree[name], np.float32).mean(0)) < 1e-4 or (
            name == "small"
        )


HALVES = {
    "psum_scatter": (dq.psum_scatter, lax.psum_scatter),
    "all_gather": (dq.all_gather, lax.all_gather),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("tiled", (True, False))
def test_halves_keep_their_contract(name, tiled):
    """Each worker gets its consecutive part, and a gather has the parts in order."""
    compressed, exact = HALVES[name]
    shape = (4, 2 * LEAF) if name == "psum_scatter" and not tiled else (2 * LEAF, 4)
    tree = {
        "a": of_workers(0, 4, 8 * LEAF).reshape(4, *shape),
        "b": of_workers(1, 4, 8 * 300).reshape(4, *(min(s, 600) for s in shape)),
    }
    method = striped("bf16", bucket_bytes=4 * LEAF)

    def local(key, tree):
        return compressed(tree, "data", method, key=key, tiled=tiled)

    found = simulated(local)(KEY, tree)
    expected = simulated(lambda key, tree: exact(tree, "data", tiled=tiled))(KEY, tree)
    for leaf in tree:
        assert found[leaf].shape == expected[leaf].shape
        assert 1e-8 < vnmse(found[leaf], expected[leaf]) < 2e-5


def test_stripes_share_one_codec_and_no_memory_is_needed_for_values_and_results(data_mesh):
    """Of sixteen buckets, each gathers in the same place of the program."""
    count, size = 16, 1 << 18
    tree = {str(number): jax.ShapeDtypeStruct((size,), jnp.float32) for number in range(count)}

    def mean(tree, start):
        tree = jax.tree.map(lambda leaf: leaf * start, tree)  # gradients, made here
        means = dq.pmean(tree, "data", striped(STOCHASTIC, bucket_bytes=4 * size), key=KEY)
        return sum(map(jnp.sum, means.values()))

    mapped = jax.shard_map(mean, mesh=data_mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(tree, jnp.float32(1)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= (count + 2.5) * 4 * size
    assert sum(c.kind == "all-gather" for c in collectives(compiled.as_text())) == 1


def test_shards_are_striped_on_every_device():
    """Over data and fsdp: as the mean of whole leaves, with the types of the shards. It leaves a
    checked map, though it is written over values that vary.
    """
    mesh = mesh_of(data=2, fsdp=4)
    tree = {"a": of_workers(0, 2, 16 * LEAF).reshape(2, 16, LEAF)}
    method = striped(STOCHASTIC, bucket_bytes=4 * LEAF, specs=P("fsdp"))

    def local(stacked):
        return dq.pmean(jax.tree.map(lambda leaf: leaf[0], stacked), "data", method, key=KEY)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"})
    found = jax.jit(mapped)(tree)["a"]
    assert 1e-7 < vnmse(found, tree["a"].mean(0)) < 1e-4


@pytest.mark.slow
def test_states_and_limits_follow_the_stripes():
    """Error feedback: over several steps no more is lost than one residual."""
    tree = regions(2)
    method = striped("ef+mxfp4", bucket_bytes=4 * LEAF)
    reduce = dq.all_reduce_gradients("data", method, with_metrics=True)

    def local(key, tree):
        state, total = reduce.init(tree), jax.tree.map(jnp.zeros_like, tree)
        for _ in range(8):
            mean, state = reduce.update(tree, state)
            total = jax.tree.map(jnp.add, total, mean)
        return jax.tree.map(lambda leaf: leaf / 8, total), state

    found, state = simulated(local)(KEY, tree)
    assert len(of_buckets(state)) == 4
    errors = [vnmse(found[name][0], tree[name].mean(0)) for name in tree]
    single = error_of(tree, "mxfp4")
    assert 1e-4 * single < errors[0] < single / 2

    limited = error_of(tree, striped("mxfp4", bucket_bytes=4 * LEAF, max_error=1e-6))
    assert limited < 1e-9 < single


def test_the_rows_of_a_matrix_are_along_its_last_dimension():
    assert number_of_stripes(2, [(4, 3, 1024)]) == 3  # 2 divides its four rows of 256
