"""`allocate_bits`: bits of each bucket from gradients, in the bytes of equal bits."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.real_lm import errors
from dynamiq_research import allocate_bits
from dynamiq_research.bit_allocation.error_curve import ErrorCurve, RowNorms, distortions
from dynamiq_research.bit_allocation.shared_budget import SharedBudget
from pallas_kernels.codec import place_rows
from pallas_kernels.codec.scales import bfloat16_bits
from research.benchmarks import real_lm_allocated
from tests.support.gradients import heavy_tailed, vnmse
from tests.support.workers import simulated

KEY = jax.random.key(0)
APART = dq.Compression(
    bucket_bytes=2**15, bucketing="in_order"
)  # leaves of 8192 coordinates have buckets of their own
SCALES = {"a": 1.0, "b": 0.1, "c": 0.03, "d": 0.01}


def leaves_of(scales, size=8192, seed=0, spread=1.0):
    return {
        name: heavy_tailed(seed + n, (size,), spread=spread, scale=scale)
        for n, (name, scale) in enumerate(scales.items())
    }


def of_workers(tree, workers):
    """Stack gradients of workers: half of the energy of each coordinate is noise of its own."""
    rng = np.random.default_rng(1)

    def stacked(leaf):
        noise = rng.standard_normal((workers, *leaf.shape), np.float32)
        return leaf * (1 + noise)

    return jax.tree.map(stacked, tree)


def error_of_mean(stacked, method, options):
    def local(key, tree):
        return dq.pmean(tree, "data", key=key, method=dataclasses.replace(options, method=method))

    mean = simulated(local)(KEY, stacked)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    truth = jax.tree.map(lambda leaf: leaf.mean(0, dtype=np.float64), stacked)
    return vnmse(flat(jax.tree.map(lambda leaf: leaf[0], mean)), flat(truth))


# ------------------------------------------------------------------------------------------ error


@pytest.mark.parametrize(
    ("workers", "bits", "spread"), [pytest.param(2, 3, 1.0, marks=pytest.mark.slow), (2, 4, 0.0)]
)
@pytest.mark.slow
def test_the_error_is_near_that_of_one_bucket(workers, bits, spread):
    stacked = of_workers(leaves_of(SCALES, 2**15, spread=spread), workers)
    apart, joint = (
        dq.Compression(bucket_bytes=2**17, bucketing="in_order"),
        dq.Compression(bucket_bytes=2**19, bucketing="in_order"),
    )
    one = jax.tree.map(lambda leaf: leaf[0], stacked)
    uniform = dq.DynamiQ(bits=bits)
    found = allocate_bits(one, axis_size=workers, method=dataclasses.replace(apart, method=uniform))
    errors = {
        "joint": error_of_mean(stacked, uniform, joint),
        "apart": error_of_mean(stacked, uniform, apart),
        "allocated": error_of_mean(stacked, found.policy, apart),
    }
    assert errors["allocated"] < 1.15 * errors["joint"]
    gain = errors["apart"] / errors["allocated"]
    assert gain > 5 and found.gain == pytest.approx(gain, rel=0.2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method",
    [dq.DynamiQ(bits=4.3), dq.DynamiQ.paper(), dq.DynamiQ(widths=(0, 3, 4, 5, 7), exponent=0.5)],
    ids=["default", "paper", "drops"],
)
@pytest.mark.parametrize("zeros", [0, 20])
def test_the_expected_error_is_that_of_the_widths_that_the_codec_takes(method, zeros):
    """As errors count that the codec minimizes, with any error for each width."""
    values = heavy_tailed(3, (400 * 256,))
    values[: 256 * zeros] = 0
    layout = method.layout(values.size, 2)
    norms = RowNorms.of(values)
    found = ErrorCurve(norms, layout).at(2 * layout.units)
    bits = bfloat16_bits(jnp.sqrt(jnp.float32(norms.squares)))
    np.testing.assert_array_equal(bits >> 1, norms.energies)
    places = place_rows(bits, layout)
    widths = np.zeros(layout.num_rows, int)
    widths[np.ravel(places.order)] = np.ravel(places.widths)
    lost = distortions(layout.quantizer)[widths]
    assert found[0] == pytest.approx(np.sum(norms.squares * lost), rel=0.02)
    assert found[1] == pytest.approx(np.sum(norms.squares**method.exponent * lost), rel=0.02)


@settings(max_examples=500)
@given(
    points=st.lists(
        st.tuples(st.integers(1, 1000), st.floats(0, 1)),
        min_size=3,
        max_size=12,
        unique_by=lambda point: point[0],
    )
)
def test_pieces_of_a_group_save_less_and_less_for_each_byte(points):
    """So taking the best ones first takes them in their order."""
    sent, costs = zip(*sorted(points), strict=True)
    group = SimpleNamespace(grid=range(len(sent)), bytes_sent=lambda bits: sent[bits])
    budget = SharedBudget((group,), np.ones(1), (np.array(costs),), (np.array(costs),))
    pieces = list(budget._pieces(0))
    returns = [piece.saved / piece.bytes for piece in pieces]
    assert returns == sorted(returns, reverse=True)
    assert sum(piece.saved for piece in pieces) == pytest.approx(costs[0] - min(costs))


# ------------------------------------------------------------------------------------------ bytes


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(2000, 60_000), min_size=1, max_size=5),
    octaves=st.lists(st.integers(-20, 20), min_size=5, max_size=5),
    bits=st.sampled_from([2.375, 3, 4.1, 5, 7.77, 12, 16]),
    axis_size=st.sampled_from([2, 3, 8, (4, 2)]),
    topology=st.sampled_from(["ring", "all_to_all"]),
)
def test_the_policy_sends_no_more_bytes_and_nearly_as_many(
    sizes, octaves, bits, axis_size, topology
):
    tree = {
        str(n): heavy_tailed(n, (size,), spread=1, scale=2.0 ** octaves[n])
        for n, size in enumerate(sizes)
    } | {"norm": np.ones(300, np.float32), "count": np.arange(3)}
    given = dataclasses.replace(APART, method=dq.DynamiQ(bits=bits), topology=topology)
    found = allocate_bits(tree, axis_size=axis_size, method=given)
    ours = dq.wire_report(tree, axis_size, found.compression)
    theirs = dq.wire_report(tree, axis_size, given)
    assert ours.bytes_per_worker == found.bytes_per_worker
    assert theirs.bytes_per_worker == found.uniform_bytes
    assert ours.bytes_per_worker <= theirs.bytes_per_worker
    assert found.error <= found.uniform_error
    # A chunk cannot send a part of a unit of all its rows: those of few rows are coarse.
    if min(sizes) > 10_000 and 3 <= bits <= 12 and axis_size != 8:
        assert ours.bytes_per_worker >= 0.99 * theirs.bytes_per_worker
    by_path = {leaf.path: leaf for leaf in ours.leaves}
    for pattern, one in found.bits.items():
        leaf = by_path[pattern.strip("^$")]
        assert leaf.method == dq.DynamiQ(bits=one)
    assert by_path["norm"].method is None and by_path["count"].method is None


# --------------------------------------------------------------------------------------- the law


@settings(max_examples=30)
@given(
    octaves=st.lists(st.integers(-30, 30), min_size=3, max_size=3),
    more=st.integers(1, 30),
    bits=st.sampled_from([3.0, 5.0, 8.0]),
)
def test_a_leaf_with_more_energy_never_gets_fewer_bits(octaves, more, bits):
    base = heavy_tailed(0, (8192,), spread=1)

    def bits_of(octaves):
        tree = {str(n): base * np.float32(2.0 ** (each / 4)) for n, each in enumerate(octaves)}
        found = allocate_bits(
            tree, axis_size=4, method=dataclasses.replace(APART, method=dq.DynamiQ(bits=bits))
        )
        return [found.bits[f"^{n}$"] for n in range(len(octaves))]

    before, after = bits_of(octaves), bits_of([octaves[0] + more, *octaves[1:]])
    assert after[0] >= before[0] and max(after[1] - before[1], after[2] - before[2]) <= 0
    order = np.argsort(octaves)
    apart = np.diff(np.array(octaves)[order]) > 0
    assert (np.diff(np.array(before)[order])[apart] >= 0).all()


@pytest.mark.parametrize("bits", [4.05, 4.1, 4.15, 4.2, 4.3])
def test_what_is_left_of_a_budget_is_spent(bits):
    tree = leaves_of({"a": 1.0, "b": 0.3}, 2**17)
    found = allocate_bits(
        tree, axis_size=4, method=dataclasses.replace(APART, method=dq.DynamiQ(bits=bits))
    )
    assert 0.996 * found.uniform_bytes < found.bytes_per_worker <= found.uniform_bytes


@pytest.mark.parametrize("rows", range(31, 42))
def test_leaves_that_join_a_bucket_do_not_send_more(rows):
    """The first and the last have the same bits, and then share a bucket, but not before."""
    size = 512 * rows
    tree = {
        "a": heavy_tailed(0, (size,)),
        "b": heavy_tailed(1, (2 * size,), scale=1e-5),
        "c": heavy_tailed(0, (size,)),
        "d": heavy_tailed(2, (2 * size,), scale=1e-4),
    }
    given = dq.Compression(bucket_bytes=8 * size, bucketing="in_order")
    found = allocate_bits(tree, axis_size=2, method=given)
    report = dq.wire_report(tree, 2, found.compression)
    assert report.bytes_per_worker == found.bytes_per_worker <= found.uniform_bytes


def test_the_cost_of_a_piece_counts():
    """A large leaf saves more error, but a small one saves more for each byte."""
    tree = {"large": heavy_tailed(0, (2**17,), scale=5e-4), "small": heavy_tailed(1, (8192,))}
    found = allocate_bits(tree, axis_size=4, method=APART)
    assert found.bits["^small$"] == pytest.approx(found.bits["^large$"] + 1, abs=0.5)


def test_equal_leaves_keep_their_bits():
    leaf = heavy_tailed(0, (8192,))
    found = allocate_bits({"a": leaf, "b": leaf}, axis_size=4, method=APART)
    assert set(found.bits.values()) == {5.0} and found.gain == pytest.approx(1)


def test_steps_count_alike_whatever_their_norms():
    first, second = leaves_of({"a": 1.0, "b": 0.01}), leaves_of({"a": 0.01, "b": 1.0})
    small = jax.tree.map(lambda leaf: leaf * np.float32(1e-6), second)
    alone, both, scaled = (
        allocate_bits(*steps, axis_size=4, method=APART).bits
        for steps in ([first], [first, second], [first, small])
    )
    assert both == scaled and alone["^a$"] > both["^a$"] == pytest.approx(5, abs=0.25)


def test_leaves_of_one_bucket_share_bits_and_so_do_parts_of_a_leaf():
    tree = leaves_of(SCALES) | {"e": heavy_tailed(9, (32, 8192))}  # e is cut into four buckets
    options = dq.Compression(bucket_bytes=2**18, bucketing="in_order")
    found = allocate_bits(tree, axis_size=4, method=options)
    assert [group.patterns for group in found.groups] == [("^a$", "^b$", "^c$", "^d$"), ("^e$",)]
    report = dq.wire_report(tree, 4, method=dataclasses.replace(options, method=found.policy))
    assert report.leaves[-1].buckets == (1, 2, 3, 4)
    assert sum(group.energy for group in found.groups) == pytest.approx(1)
    assert sum(group.error for group in found.groups) == pytest.approx(found.error)


def test_patterns_of_groups_are_those_of_the_policy():
    tree = {"x": leaves_of(SCALES), "y": leaves_of(SCALES, seed=5), "z": np.ones(8, np.float32)}
    found = allocate_bits(tree, axis_size=4, groups=["/a", "^x", ".*"], method=APART)
    assert list(found.policy) == ["/a", "^x", ".*"]
    report = dq.wire_report(tree, 4, method=dataclasses.replace(APART, method=found.policy))
    assert report.bytes_per_worker == found.bytes_per_worker <= found.uniform_bytes
    assert found.bits["/a"] > found.bits["^x"] + 2


@pytest.mark.parametrize("groups", [None, ["[abc]", "d"]])
def test_other_fields_and_other_methods_of_a_policy_stay(groups):
    tree = leaves_of(SCALES)
    paper = dq.DynamiQ.paper(bits=5.0, rounding="independent")
    policy = {"a": "bf16", "b": "uncompressed", "": paper}
    found = allocate_bits(
        tree, axis_size=4, method=dataclasses.replace(APART, method=policy), groups=groups
    )
    bits = dict(zip("cd", found.bits.values(), strict=True))
    report = dq.wire_report(tree, 4, method=dataclasses.replace(APART, method=found.policy))
    methods = {leaf.path: leaf.method for leaf in report.leaves}
    assert methods["a"] == dq.methods.BF16() and methods["b"] is None
    for name in "cd":
        assert methods[name] == dataclasses.replace(paper, bits=bits[name])
    assert bits["c"] > 5 > bits["d"] >= 2.625


@pytest.mark.slow
def test_a_phase_of_a_schedule_has_a_new_policy(data_mesh):
    early, late = leaves_of({"a": 1.0, "b": 1e-3}), leaves_of({"a": 1e-3, "b": 1.0})
    found = [allocate_bits(each, axis_size=2, method=APART) for each in (early, late)]
    policies = [each.policy for each in found]
    schedule = dq.Schedule({number: each.compression for number, each in enumerate(found)})
    reduce = dq.all_reduce_gradients("data", method=schedule)

    @jax.jit
    @jax.shard_map(mesh=data_mesh(2), in_specs=(P("data"), P()), out_specs=(P(), P()))
    def mean(stacked, state):
        return reduce.update(jax.tree.map(lambda leaf: leaf[0], stacked), state)

    state = reduce.init(early)
    for number, tree in enumerate((early, late)):
        stacked = of_workers(tree, 2)
        found, state = mean(stacked, state)
        expected = error_of_mean(stacked, policies[number], APART)
        other = error_of_mean(stacked, policies[1 - number], APART)
        truth = jax.tree.map(lambda leaf: leaf.mean(0, dtype=np.float64), stacked)
        error = float(dq.vnmse(found, jax.tree.map(np.float32, truth)))
        assert error == pytest.approx(expected, rel=0.1) and other > 10 * expected


@pytest.mark.slow
def test_the_benchmark_has_less_error_in_the_same_bytes(data_mesh, monkeypatch):
    """The embedding, of little energy, has a bucket of its own."""
    rng, mesh = np.random.default_rng(0), data_mesh(2)
    sizes = {"embed_tokens": 0.02, "layers.0.mlp": 1.0, "layers.0.attn": 0.5, "norm": 0.5}
    leaves = {
        name: (size * rng.normal(size=(2, 512, 256))).astype(np.float32)
        for name, size in sizes.items()
    }
    stacked = {
        name: jax.device_put(leaf, NamedSharding(mesh, P("data"))) for name, leaf in leaves.items()
    }
    mean = {name: leaf.mean(axis=0, dtype=np.float64) for name, leaf in leaves.items()}
    row = {"workers": 2, "topology": "ring", "bucketing": "in_order", "seed": 0}

    def setting_of(row, stacked):
        return dq.Compression(row["method"], bucketing="in_order", bucket_bytes=2**19)

    monkeypatch.setattr(errors, "setting_of", setting_of)
    equal, own = (
        errors.measured(stacked, mean, row | {"method": method}, setting)
        for method, setting in (
            ("dynamiq:5", setting_of),
            ("allocated dynamiq:5", real_lm_allocated.allocated),
        )
    )
    assert own["bits"] <= equal["bits"]
    assert 0 < own["vnmse"] < 0.5 * equal["vnmse"]


# ------------------------------------------------------------------------------------------ input


def test_the_table_has_a_line_for_each_group():
    leaves = leaves_of({**SCALES, "of_a_long_name": 0.01})
    found = allocate_bits(leaves, axis_size=4, method=APART)
    lines = str(found).splitlines()
    assert re.match(r"leaves +size +energy +bits +error$", lines[0])
    assert len({len(line) for line in lines[:-1]}) == 1 and len(lines) == 1 + 5 + 2
    assert re.match(r"\^a\$ +8,192 +9\d\.\d% +[\d.]+ +\d\.\de-\d\d$", lines[1])
    assert re.search(rf"{found.gain:.2f} times lower", lines[-1])
    assert found == allocate_bits(leaves, axis_size=4, method=APART)


LEAF = heavy_tailed(0, (8192,))
BAD = np.where(np.arange(8192) == 7, np.nan, LEAF)


@pytest.mark.parametrize(
    ("steps", "arguments", "message"),
    [
        ([], {}, "gradients are missing"),
        ([{}], {}, "none of the 0 leaves"),
        ([{"a": BAD}], {}, r"gradients\[0\] has NaN or Inf at 'a'"),
        ([{"a": LEAF}, {"a": BAD}], {}, r"gradients\[1\] has NaN or Inf at 'a'"),
        ([{"a": 0 * LEAF}], {}, r"gradients\[0\] are zero"),
        ([{"a": LEAF}, {"b": LEAF}], {}, r"gradients\[1\] has another structure"),
        ([{"a": LEAF}, {"a": LEAF[:5000]}], {}, r"gradients\[1\] has another structure or other"),
        ([{"a": jax.ShapeDtypeStruct((8192,), "f4")}], {}, r"gradients\[0\] has no values at 'a'"),
        ([{"a": LEAF[:100]}], {}, r"none of the 1 leaves.*exact_below=0"),
        ([{"a": LEAF}], {"axis_size": 1}, "none of the 1 leaves with axis_size=1"),
        ([{"a": LEAF}], {"axis_size": 0}, "axis_size=0 is not a number of workers"),
        ([{"a": LEAF}], {"method": "dynamiq:17"}, "bits=17 is out of range"),
        ([{"a": LEAF}], {"method": "bf16"}, r"method='bf16'.*have no bits to give"),
        ([{"a": LEAF}], {"method": {"b": "dynamiq"}}, "no pattern for the leaf 'a'"),
        ([{"a": LEAF}], {"groups": ["b"]}, r"groups=\['b'\] have no pattern for the leaf 'a'"),
        ([{"a": LEAF}], {"groups": ["a", "b"]}, r"groups.*no leaf is left for 'b'"),
        ([{"a": LEAF}], {"groups": ["("]}, "are no regular expressions"),
        ([{"a": LEAF}], {"groups": "a"}, "groups='a'.*Give several"),
        (
            [{"a": LEAF, "b": LEAF}],
            {"method": {"a": "dynamiq:4", "": "dynamiq:5"}, "groups": [""]},
            "leaves of '' have several methods",
        ),
        (
            [{"a": LEAF, "b": LEAF}],
            {"method": {"a": "dynamiq:5:exponent=0.5", "": "dynamiq:5"}},
            r"exponents \[0.5, 1.0\] cannot be compared",
        ),
    ],
)
def test_input_that_is_not_possible(steps, arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*[.]$"):
        allocate_bits(*steps, **({"axis_size": 4} | arguments))


def test_traced_gradients_are_refused():
    with pytest.raises(ValueError, match=r"has no values at ''.*outside of jax\.jit"):
        jax.jit(lambda g: allocate_bits(g, axis_size=4).error)(LEAF)
