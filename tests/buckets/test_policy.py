"""Policies: a method for each leaf, in every collective, with its bytes and its state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._inputs.policy import Policy, paths_of
from dynamiq_jax.methods import METHODS, BlockInt, resolve_method
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import compiled_collectives
from tests.support.workers import simulated

KEY = jax.random.key(3)
WORKERS = 4
TREE = {
    "embedding": of_workers(0, WORKERS, 20 * 512).reshape(WORKERS, 20, 512),
    "layers": [
        {"kernel": of_workers(1 + n, WORKERS, 4096).reshape(WORKERS, 64, 64), "norm": v}
        for n, v in enumerate(of_workers(9, WORKERS, 2 * 64).reshape(2, WORKERS, 64))
    ],
}
ONE = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), TREE)
POLICY = {"embedding": "dynamiq:6", "norm": "uncompressed", "layers/0": "bf16", "": "blockint:6"}


def mean_of(method, tree=TREE, **arguments):
    def local(key, tree):
        return dq.pmean(tree, "data", key=key, method=method, **arguments)

    return simulated(local)(KEY, tree)


NAMES = ("a", "b", "ab")
PATTERNS = ("a", "^a", "b/", "b$", "a/b", "c")


@given(
    paths=st.lists(st.tuples(*[st.sampled_from(NAMES)] * 2), min_size=1, max_size=6, unique=True),
    patterns=st.lists(st.sampled_from(PATTERNS), max_size=4, unique=True),
)
def test_the_first_pattern_that_is_found_in_a_path_counts(paths, patterns):
    tree = {}
    for first, second in paths:
        tree.setdefault(first, {})[second] = jnp.zeros(1)
    patterns = [*patterns, ".*"]
    rules = {pattern: BlockInt(code_bits=2 + n) for n, pattern in enumerate(patterns)}
    first = [
        next(n for n, pattern in enumerate(patterns) if re.search(pattern, path))
        for path in paths_of(tree)
    ]
    unused = set(range(len(patterns))) - set(first)
    if unused:
        with pytest.raises(ValueError, match=re.escape(repr(patterns[min(unused)])[1:-1])):
            Policy.of(rules).methods(tree)
    else:
        found = Policy.of(rules).methods(tree)
        assert [method.code_bits - 2 for method in found] == first


def test_trees_without_leaves_and_leaves_that_are_not_floating_need_no_pattern():
    assert Policy.of(POLICY).methods({}) == []
    methods = Policy.of({"w": "bf16"}).methods({"count": 3, "w": np.ones(3)})
    assert methods == [None, dq.methods.BF16()]
    assert dq.wire_report({"nothing": None}, WORKERS, method=POLICY).bytes_per_worker == 0


@pytest.mark.slow
def test_each_leaf_has_the_error_of_its_method():
    found, truth = mean_of(POLICY), jax.tree.map(lambda leaf: leaf.mean(0, keepdims=True), TREE)
    errors = jax.tree.map(lambda ours, exact: float(vnmse(ours[:1], exact)), found, truth)
    alone = mean_of("dynamiq:6", {"embedding": TREE["embedding"]})["embedding"]
    assert errors["embedding"] == pytest.approx(vnmse(alone[:1], truth["embedding"]), rel=0.05)
    assert 1e-6 < errors["layers"][0]["kernel"] < 1e-4 < errors["layers"][1]["kernel"] < 1e-2
    exact = simulated(lambda _, tree: jax.lax.pmean(tree, "data"))(KEY, TREE)
    for layer, summed in zip(found["layers"], exact["layers"], strict=True):
        np.testing.assert_array_equal(layer["norm"], summed["norm"])


@pytest.mark.parametrize("method", ["uncompressed", "exact"])
def test_uncompressed_is_left_to_jax_and_exact_is_sent_like_any_method(data_mesh, method):
    """Alone and in a policy, both with the bytes of float32. Norms are below `exact_below`."""
    found = compiled_collectives(data_mesh(WORKERS), ONE, {".*": method}, "ring")
    kinds = {each.kind for each in found}
    assert ("collective-permute" in kinds) == (method == "exact")
    assert "all-reduce" in kinds
    for policy in (method, {".*": method}, lambda path, leaf: method):
        report = dq.wire_report(ONE, WORKERS, method=policy)
        assert report.bytes_per_worker == sum(2 * 3 / 4 * 4 * leaf.size for leaf in report.leaves)
        chosen = {leaf.method for leaf in report.leaves if "norm" not in leaf.path}
        assert chosen == {dq.methods.Exact() if method == "exact" else None}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", METHODS.own)
def test_every_method_works_beside_another_one(name):
    """With a state, where it has one, that resumes bit for bit."""
    reduce = dq.all_reduce_gradients("data", method={"embedding": name, "": "ef+bf16"}, seed=1)
    tree = {"embedding": TREE["embedding"], "kernel": TREE["layers"][0]["kernel"]}
    update = jax.jit(jax.vmap(reduce.update, axis_name="data"))
    state = jax.vmap(reduce.init, axis_name="data")(tree)
    _, state = update(tree, state)
    saved = jax.tree.map(np.array, state)
    means, after = update(tree, state)
    again, state = update(tree, saved)
    jax.tree.map(np.testing.assert_array_equal, (means, after), (again, state))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, saved)
    assert set(after.metrics) == {*resolve_method(name).metrics, "reset_states"}
    assert (after.metrics["reset_states"] == 0).all()
    assert vnmse(means["kernel"][:1], tree["kernel"].mean(0, keepdims=True)) < 1e-4
    for leaf in jax.tree.leaves(means):
        assert (leaf == leaf[:1]).all()


def test_the_report_says_leaf_by_leaf_what_is_sent_and_how():
    report = dq.wire_report(ONE, WORKERS, method=POLICY)
    by_path = {leaf.path: leaf for leaf in report.leaves}
    assert list(by_path) == paths_of(ONE)
    assert by_path["embedding"].method == dq.DynamiQ(bits=6)
    assert by_path["layers/0/kernel"].bytes == 2 * 3 / 4 * 2 * 4096  # float16, there and back
    assert by_path["layers/1/norm"].method is None
    assert by_path["layers/1/norm"].bytes == 2 * 3 / 4 * 4 * 64
    text = str(report).splitlines()
    assert len(text) == len(by_path) + 2
    assert re.match(r"embedding +10,240 +DynamiQ\(bits=6\) +[\d,]+$", text[1])
    assert re.match(r"layers/0/norm +64 +exact: by the policy +384$", text[3])
    assert sum(leaf.bytes for leaf in report.leaves) == pytest.approx(report.bytes_per_worker)
    assert re.match(rf"all +{20 * 512 + 2 * (4096 + 64):,} +{report.bytes_per_worker:,}$", text[-1])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({}, r"method=\{\} has no pattern for the leaf 'embedding'"),
        ({"embedding": "bf16"}, r"no pattern for the leaf 'layers/0/kernel'.*'\.\*'"),
        (
            {"embeding": "bf16", "": "uncompressed"},
            r"no leaf is left for \['embeding'\].*layers/0/kernel",
        ),
        ({"": "uncompressed", "norm": "bf16"}, r"no leaf is left for \['norm'\]"),
        ({"(": "bf16"}, r"'\(' is not a regular expression"),
        ({3: "bf16"}, r"3 is not a regular expression"),
        ({"": "bf17"}, "method='bf17' is not known"),
        (lambda path, leaf: None, "method=None is not known"),
        ({"norm": "uncompressed", "": "blockint:block=3"}, "blockint"),
    ],
)
def test_policies_that_are_not_possible(policy, message):
    with pytest.raises(ValueError, match=message):
        mean_of(policy)


@pytest.mark.parametrize(
    "policy",
    (
        {"norm": "uncompressed", "": "ef+bf16"},
        lambda path, leaf: "uncompressed" if "norm" in path else "ef+bf16",
    ),
    ids=("patterns", "function"),
)
def test_methods_with_a_state_are_refused_where_it_cannot_be_kept(policy):
    with pytest.raises(ValueError, match=r"carries state.*dq\.pmean cannot keep"):
        mean_of(policy)


def test_methods_that_a_collective_cannot_use_are_refused_for_any_leaf():
    def local(key, tree):
        return dq.psum_scatter(tree, "data", key=key, method={"a": "ef+bf16", "b": "bf16"})

    with pytest.raises(ValueError, match="psum_scatter"):
        simulated(local)(KEY, {"a": np.ones((4, 4, 2048)), "b": np.ones((4, 4, 2048))})


@pytest.mark.slow
def test_fragments_of_local_sgd_have_the_methods_of_their_leaves(data_mesh):
    local_sgd = dq.training.LocalSGD(axis_name="data", every=2, fragments=2, method=POLICY)
    reports = local_sgd.wire_report(ONE, WORKERS)
    found = {leaf.path: leaf.method for report in reports for leaf in report.leaves}
    whole = {leaf.path: leaf.method for leaf in dq.wire_report(ONE, 4, method=POLICY).leaves}
    assert found == whole

    @jax.jit
    @jax.shard_map(mesh=data_mesh(WORKERS), in_specs=P(), out_specs=P())
    def reference(params):
        state = local_sgd.init(params)
        for _ in range(2):
            _, state = local_sgd.update(jax.tree.map(jnp.zeros_like, params), state)
        return state.reference

    params = jax.tree.map(lambda leaf: leaf[0], TREE)
    found = reference(params)
    outer = 1 - 0.7 * 1.9  # of a Nesterov step to zero, once for each fragment
    assert vnmse(found["embedding"], outer * params["embedding"]) < 1e-2
    np.testing.assert_allclose(
        found["layers"][0]["norm"], outer * params["layers"][0]["norm"], rtol=1e-4
    )
    unused = {"none": "uncompressed", "": "bf16"}
    with pytest.raises(ValueError, match="no leaf is left"):
        dq.training.LocalSGD(axis_name="data", method=unused).wire_report(ONE, WORKERS)


def test_shards_have_the_methods_of_their_leaves():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    specs = jax.tree.map(lambda _: P(), ONE)
    specs["embedding"] = P(None, "model")
    report = dq.wire_report(ONE, "data", method=dq.Compression(POLICY, specs=specs), mesh=mesh)
    sizes = {leaf.path: leaf.size for leaf in report.leaves}
    assert sizes["embedding"] == 20 * 256 and sizes["layers/1/kernel"] == 4096
