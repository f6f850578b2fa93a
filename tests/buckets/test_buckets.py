"""Leaves to buckets: each leaf once, in order, in buckets that are not too large. Buckets travel
one after the other, each with noise of its own.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._buckets.cutting import as_vector, cut
from dynamiq_jax._run.loop import after
from dynamiq_jax.methods import ChunkedMethod, RecodedChunks, WireCost
from tests.support.buckets import plan_of
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import collectives
from tests.support.workers import COLLECTIVES, STOCHASTIC, mapped, on_mesh, simulated

KEY = jax.random.key(0)
in_order = functools.partial(dq.Compression, bucketing="in_order")  # see test_stripes.py for others
# Each gives a whole result or the worker's part.
every_collective = pytest.mark.parametrize("name", ("pmean", "psum_scatter", "all_gather"))


def compiled(mesh, tree, fn) -> str:
    """HLO of a function of local trees, for stacked shapes [workers, ...]."""
    return jax.jit(mapped(fn, mesh)).lower(tree).compile().as_text()


# ----------------------------------------------------------------------------------------- plans


@given(
    sizes=st.lists(st.integers(1024, 1_000_000), min_size=1, max_size=12),
    slices=st.sampled_from((1, 3, 8, 13, 1024)),
    dtypes=st.data(),
    bucket_bytes=st.integers(1, 4_000_000),
)
def test_every_coordinate_is_in_one_bucket_of_its_dtype(sizes, slices, dtypes, bucket_bytes):
    kinds = dtypes.draw(st.lists(st.sampled_from((jnp.float32, jnp.bfloat16)), min_size=12))
    leaves = [
        jax.ShapeDtypeStruct((slices, -(-size // slices)), dtype)
        for size, dtype in zip(sizes, kinds, strict=False)
    ]
    plan = plan_of(leaves, bucket_bytes=bucket_bytes, bucketing="in_order")
    assert plan.exact == ()
    covered = {index: [] for index in range(len(leaves))}
    for bucket in plan.buckets:
        assert list(bucket.leaves) == sorted(bucket.leaves)
        assert {leaves[i].dtype for i in bucket.leaves} == {bucket.dtype}
        for index in bucket.leaves:
            covered[index].append(bucket.part or (0, slices))
        slice_size = leaves[bucket.leaves[0]].shape[1]
        size = sum(leaves[i].size for i in bucket.leaves)
        if bucket.part is not None:
            size = (bucket.part[1] - bucket.part[0]) * slice_size
        assert bucket.size == size == bucket.call.size
        assert bucket.call.shapes is None
        within = bucket.size * bucket.dtype.itemsize <= bucket_bytes
        if bucket.part is not None:
            assert len(bucket.leaves) == 1
            assert within or bucket.size <= max(2**16, slice_size)
    for parts in covered.values():
        ends = [0, *(last for _, last in sorted(parts))]
        assert sorted(parts) == list(itertools.pairwise(ends))
        assert ends[-1] == slices
    # Not cut finer than it has to be: two neighbors of one dtype would not fit into one bucket.
    for dtype in (jnp.float32, jnp.bfloat16):
        whole = [b for b in plan.buckets if b.dtype == dtype and b.part is None]
        for one, next_one in itertools.pairwise(whole):
            if one.leaves[-1] + 1 == next_one.leaves[0]:
                first = leaves[next_one.leaves[0]].size
                assert (one.size + first) * one.dtype.itemsize > bucket_bytes - one.dtype.itemsize


def test_parts_of_a_large_leaf_are_alike():
    width = 2**14

    def sizes(slices: int) -> list[int]:
        leaf = jax.ShapeDtypeStruct((slices, width), jnp.float32)
        plan = plan_of([leaf], bucket_bytes=4 * 5 * width, bucketing="in_order")
        return [bucket.size // width for bucket in plan.buckets]

    assert sizes(32) == [4] * 8
    assert sizes(13) == [5, 5, 3]
    assert sizes(129) == [3] * 43
    assert sizes(5) == [5]


@settings(max_examples=8)  # each compiles
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    rows=st.integers(1, 5),
    multiple=st.integers(1, 70),
)
def test_leaves_are_joined_into_rows_and_split_again(sizes, rows, multiple):
    """A row of the flat vector has the row of each leaf in order, then padding."""
    ends = np.cumsum([0, *(rows * size for size in sizes)])
    leaves = [
        np.arange(first + 1, last + 1, dtype=np.float32).reshape(rows, -1)
        for first, last in itertools.pairwise(ends)
    ]
    flat = np.asarray(as_vector(list(map(jnp.asarray, leaves)), multiple))
    width = sum(sizes)
    padded = -(-width // multiple) * multiple
    joined = flat.reshape(rows, padded)
    np.testing.assert_array_equal(joined[:, :width], np.concatenate(leaves, axis=1))
    assert not joined[:, width:].any()
    for leaf, piece in zip(leaves, cut(jnp.asarray(joined), sizes), strict=True):
        np.testing.assert_array_equal(piece, leaf)


# ------------------------------------------------------------------------------ several buckets


TREE = {"a": (24, 100), "b": (8, 5, 40), "c": (4000,), "d": (12, 200)}  # for 4 workers


def stacked_tree():
    sizes = [int(np.prod(shape)) for shape in TREE.values()]
    flat = np.split(of_workers(3, 4, sum(sizes)), np.cumsum(sizes)[:-1], axis=1)
    return {name: part.reshape(4, *TREE[name]) for name, part in zip(TREE, flat, strict=True)}


@pytest.mark.sampled(3)
@every_collective
@pytest.mark.parametrize("bucket_bytes", (1 << 20, 4 * 6400, 1), ids=("one", "two", "four"))
def test_leaves_of_several_sizes_come_back_in_their_places(name, bucket_bytes):
    """Whatever the buckets. The bound is that of bfloat16: nothing is where another one belongs."""
    tree, (collective, exact) = stacked_tree(), COLLECTIVES[name]
    scale = 4 if name == "all_gather" else 1  # buckets of a gather count once gathered

    def local(key, tree):
        method = in_order("bf16", bucket_bytes=scale * bucket_bytes, exact_below=0)
        return collective(tree, "data", method, key=key)

    found = simulated(local)(KEY, tree)
    expected = simulated(lambda key, tree: exact(tree, "data"))(KEY, tree)
    for leaf in tree:
        assert (found[leaf].shape, found[leaf].dtype) == (expected[leaf].shape, np.float32)
        assert 1e-7 < vnmse(found[leaf], expected[leaf]) < 2e-5, leaf


@every_collective
def test_buckets_have_rounding_noise_of_their_own(name):
    """Equal leaves in two buckets are rounded differently; the same key gives the same bits."""
    leaf = of_workers(0, 2, 4096)

    def local(key, tree):
        return COLLECTIVES[name][0](tree, "data", in_order(STOCHASTIC, bucket_bytes=1), key=key)

    run = simulated(local)
    result, again = (run(KEY, {"a": leaf, "b": leaf}) for _ in range(2))
    assert np.mean(np.asarray(result["a"]) != np.asarray(result["b"])) > 0.1
    jax.tree.map(np.testing.assert_array_equal, result, again)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unrolled", (0, 1))
@pytest.mark.parametrize("stacked", (False, True), ids=("leaves", "one leaf"))
def test_equal_buckets_share_a_codec_and_keep_their_bits(data_mesh, stacked, unrolled):
    """A loop over buckets that are alike: the same bits, and the codec is compiled once."""
    size, count = 2**16, 4
    values = of_workers(3, 2, count * size).reshape(2, count, size)
    tree = {"w": values} if stacked else {str(n): values[:, n] for n in range(count)}
    results, codecs = [], []
    for alone in (count, unrolled):
        method = in_order(STOCHASTIC, bucket_bytes=4 * size, unrolled_buckets=alone)
        reduce = functools.partial(dq.pmean, axis_name="data", key=KEY, method=method)
        run = on_mesh(lambda key, tree, reduce=reduce: reduce(tree), data_mesh(2))
        results.append(jax.tree.leaves(run(KEY, tree)))
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        gathers = [
            c for c in collectives(compiled(data_mesh(2), shapes, reduce)) if c.kind == "all-gather"
        ]
        codecs.append(len(gathers))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert codecs == [count, unrolled + 1]


def test_buckets_that_are_alike_are_traced_once():
    """Each has its own place in the program, but eight take no more Python than one."""
    traced = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Counted(dq.methods.BF16):
        def bind(self, values, call, key):
            traced.append(call.size)
            return super().bind(values, call, key)

    def mean(tree):
        return dq.pmean(tree, "data", in_order(Counted(), bucket_bytes=1), key=KEY)

    tree = {
        str(n): jax.ShapeDtypeStruct((2, 8192 if n < 8 else 9216), jnp.float32) for n in range(9)
    }
    jax.jit(jax.vmap(mean, axis_name="data")).lower(tree)
    assert traced == [9216, 8192]


@every_collective
def test_small_buckets_are_collectives_of_their_own(data_mesh, name):
    """As many as the options ask for, and together they send the bytes of the report."""
    leaves = dict.fromkeys("abcd", jax.ShapeDtypeStruct((8192,), jnp.float32))
    tree = dict.fromkeys("abcd", jax.ShapeDtypeStruct((4, 8192), jnp.float32))
    collective = functools.partial(COLLECTIVES[name][0], axis_name="data", key=KEY)
    whole = 8192 * (16 if name == "all_gather" else 4)  # bytes of a leaf in a bucket
    for bucket_bytes, count in ((1, 4), (2 * whole, 2), (1 << 30, 1)):
        options = in_order("bf16", bucket_bytes=bucket_bytes)
        text = compiled(data_mesh(4), tree, functools.partial(collective, method=options))
        found = collectives(text)
        of_loops = [c for c in found if c.kind == "collective-permute" and c.looped]
        gathers = [c for c in found if c.kind == "all-gather"]
        assert len(of_loops) == (0 if name == "all_gather" else count)
        assert len(gathers) == (0 if name == "psum_scatter" else count)
        if name == "pmean":
            report = dq.wire_report(leaves, 4, options)
            assert sum(c.sent_bytes(4) for c in found) == report.bytes_per_worker


# ------------------------------------------------------------------------------ order of buckets


def test_memory_beside_the_result_is_that_of_two_buckets(data_mesh):
    """Of sixteen buckets, the first eight of which have codecs of their own."""
    count, size = 16, 1 << 18
    tree = {str(number): jax.ShapeDtypeStruct((size,), jnp.float32) for number in range(count)}

    def mean(tree):
        return dq.pmean(tree, "data", in_order(STOCHASTIC, bucket_bytes=4 * size), key=KEY)

    program = jax.shard_map(mean, mesh=data_mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
    memory = jax.jit(program).lower(tree).compile().memory_analysis()
    assert memory.output_size_in_bytes >= 4 * size * count
    assert memory.temp_size_in_bytes <= memory.output_size_in_bytes + 2.5 * 4 * size


@every_collective
def test_a_bucket_waits_for_those_before_it(data_mesh, name):
    """One leaf needs the transfers of the buckets before its own, and of none behind: the last
    leaves go first, as a backward pass makes them, and the parts of a gather in their order.
    Were the wait removed, by the compiler too, no leaf would need any transfer but its own.
    """
    tree = {name: jax.ShapeDtypeStruct((2, 8192), jnp.float32) for name in "abc"}

    def transfers_for(leaf):
        def of_leaf(tree):
            method = in_order("bf16", bucket_bytes=1)
            return COLLECTIVES[name][0](tree, "data", method, key=KEY)[leaf]

        return len(collectives(compiled(data_mesh(2), tree, of_leaf)))

    counts = [transfers_for(leaf) for leaf in "abc"]
    first = min(counts)
    assert first > 0
    assert counts == [first, 2 * first, 3 * first][:: 1 if name == "all_gather" else -1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sorting(ChunkedMethod):
    """A method whose decoder sorts, which can be counted in a program."""

    def wire_cost(self, call):
        return WireCost(payload_bytes=2 * -(-call.size // call.num_chunks))

    def bind(self, values, call, key):
        return RecodedChunks(
            local=call.local_chunks(values),
            encode=lambda values, chunk, turn: values.astype(jnp.float16),
            decode=lambda payload, chunk: jnp.sort(payload).astype(jnp.float32),
        )


@every_collective
def test_a_bucket_does_not_wait_until_others_are_decoded(data_mesh, name):
    """It waits for the transfers of those before it. To decode them is dead code where the result
    of the last bucket alone is asked for.
    """
    tree = {name: jax.ShapeDtypeStruct((2, 4096), jnp.float32) for name in "abc"}

    def counts(names):
        def fn(tree):
            method = in_order(Sorting(), "all_to_all", bucket_bytes=1)
            result = COLLECTIVES[name][0](tree, "data", method, key=KEY)
            return [result[leaf] for leaf in names]

        text = compiled(data_mesh(2), tree, fn)
        return len(collectives(text)), len(re.findall(r"= \S+ sort\(", text))

    transfers, sorts = counts("abc")
    last = "c" if name == "all_gather" else "a"
    # A mean decodes once more, to sum: no bucket can do without that.
    to_sum = 3 if name == "pmean" else 0
    assert sorts == to_sum + 3
    assert counts(last) == (transfers, to_sum + 1)


def test_the_wait_changes_no_value_and_is_not_compiled_away():
    """The comparison with the token is always true, and the compiler must not find that out."""
    flat = jnp.linspace(-3.0, 3.0, 7).at[2].set(jnp.nan)
    wait = jax.jit(lambda token, flat: after(token, flat))
    for token in (0.0, -0.0, 1.0, -1e-45, 3e38, np.inf, -np.inf, np.nan):
        np.testing.assert_array_equal(wait(jnp.full((1,), token, jnp.float32), flat), flat)
    for bits in (0xFF, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000001):
        token = lax.bitcast_convert_type(jnp.full((1,), bits, jnp.uint32), jnp.float32)
        np.testing.assert_array_equal(wait(token, flat), flat)
    text = wait.lower(jnp.ones(1), flat).compile().as_text()
    assert "compare(" in text and "select(" in text
    assert wait(jnp.ones(1, jnp.bfloat16), flat.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert after(None, flat) is flat


# --------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("name", ("bucket_bytes", "exact_below"))
@pytest.mark.parametrize("value", (-1, 0.5, float("inf"), float("nan"), True, "1024", None))
def test_options_that_are_not_numbers_of_that_kind(name, value):
    span = {"bucket_bytes": "from 1 to 1879048192", "exact_below": "of at least 0"}[name]
    message = f"{name}={value!r} is not possible. Give an integer {span}."
    with pytest.raises(ValueError, match=re.escape(message)):
        dq.Compression(**{name: value})


def test_options_are_a_frozen_value_of_keywords():
    with pytest.raises(ValueError, match=r"bucket_bytes=0 .* from 1 "):
        dq.Compression(bucket_bytes=0)
    options = dq.Compression(exact_below=0)
    assert options == dq.Compression(exact_below=0) != dq.Compression()
    assert dq.Compression().exact_below == 1024
    assert dq.Compression().bucket_bytes == 128 << 20
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.exact_below = 6
    with pytest.raises(TypeError, match="positional"):
        dq.Compression("exact", "ring", 5)
    few = jax.ShapeDtypeStruct((4096,), jnp.float32)
    of_numpy = dq.Compression(exact_below=np.int64(5000), bucket_bytes=np.int64(1 << 20))
    report = dq.wire_report(few, 2, method=of_numpy)
    assert report.leaves[0].why_exact == "4096 elements are fewer than exact_below=5000"
