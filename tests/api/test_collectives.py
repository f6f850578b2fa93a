"""psum and pmean: one result on all workers, the same simulated and on a mesh, for any pytree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.gradients import heavy_tailed, of_workers, vnmse
from tests.support.workers import (
    COLLECTIVES,
    STOCHASTIC,
    TWO_WIDTHS,
    described,
    mesh_of,
    on_mesh,
    simulated,
)

KEY, OTHER_KEY = jax.random.key(0), jax.random.key(1)
manual = pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))


def local_stochastic(key, tree):
    return dq.psum(tree, "data", key=key, method=STOCHASTIC)


def local_bf16(key, tree):
    return dq.psum(tree, "data", key=key, method="bf16")


stochastic, bf16 = simulated(local_stochastic), simulated(local_bf16)


@functools.cache
def tree_of(num_workers: int):
    """Two leaves that share a bucket, one that is too small for it. Nothing divides evenly."""
    flat = of_workers(num_workers, num_workers, 30_000)
    return {
        "kernel": flat[:, :20_480].reshape(-1, 80, 256),
        "embedding": flat[:, 20_480:].reshape(-1, 28, 340),
        "bias": of_workers(99, num_workers, 40),
    }


def assert_same_bits(ours, expected):
    assert described(ours) == described(expected)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def assert_replicated(stacked):
    """All workers hold the same bits (the first axis counts workers)."""
    for leaf in jax.tree.leaves(stacked):
        leaf = np.asarray(leaf)
        assert {copy.tobytes() for copy in leaf} == {leaf[0].tobytes()}


# --------------------------------------------------------------------- replicas, simulation, keys


@pytest.mark.parametrize("num_workers", (1, 3))
def test_sums_are_close_and_replicated_and_depend_on_the_key(num_workers):
    tree = tree_of(num_workers)
    result = stochastic(KEY, tree)
    assert_replicated(result)
    assert_same_bits(stochastic(jax.random.key(0), tree), result)
    other = stochastic(OTHER_KEY, tree)
    for name in ("kernel", "embedding"):
        error = vnmse(result[name][0], tree[name].sum(axis=0, dtype=np.float64))
        # One worker sends nothing and loses nothing, whatever the key.
        assert error == 0 if num_workers == 1 else 1e-6 < error < 1e-4
        assert np.array_equal(other[name], result[name]) == (num_workers == 1)
    exact = jax.vmap(lambda leaf: lax.psum(leaf, "data"), axis_name="data")(tree["bias"])
    np.testing.assert_array_equal(result["bias"], exact)
    np.testing.assert_array_equal(other["bias"], exact)


@pytest.mark.parametrize("num_workers", (1, 3))
def test_the_mean_is_the_sum_divided_by_the_workers(num_workers):
    """In float32, before any cast."""
    tree = tree_of(num_workers)
    mean = simulated(lambda key, tree: dq.pmean(tree, "data", key=key, method=STOCHASTIC))
    total = stochastic(KEY, tree)
    divided = jax.tree.map(lambda leaf: leaf * np.float32(1 / num_workers), total)
    assert_same_bits(mean(KEY, tree), divided)


# ----------------------------------------------------------------------------------------- bias


def test_steps_of_a_scan_have_keys_of_their_own():
    """Under loops and jit like any collective."""

    def local(key, gradient):
        def step(total, index):
            reduced = local_stochastic(jax.random.fold_in(key, index), gradient)
            return total + reduced, None

        return lax.scan(step, jnp.zeros_like(gradient), jnp.arange(4))[0]

    gradient = tree_of(2)["kernel"]
    each = [np.asarray(stochastic(jax.random.fold_in(KEY, step), gradient)) for step in range(4)]
    found = simulated(local)(KEY, gradient)
    np.testing.assert_allclose(found, sum(each), rtol=1e-5, atol=1e-8)
    # More than rounding apart from the same step four times.
    assert vnmse(found, 4 * each[0]) > 1e-6


# ---------------------------------------------------------------------------------------- dtypes


def mixed_tree(num_workers: int):
    rng = np.random.default_rng(0)

    def floats(*shape):
        return heavy_tailed(1, (num_workers, *shape), scale=1.0)

    return {
        "f32": floats(64, 64),
        "bf16": jnp.asarray(floats(64, 64)).astype(jnp.bfloat16),
        "f16": (floats(64, 64) / 64).astype(np.float16),
        "layers": [floats(3), (floats(), None), {"empty": floats(0, 5)}],
        "small_bf16": jnp.asarray(floats(9)).astype(jnp.bfloat16),
        "int32": rng.integers(-(2**20), 2**20, (num_workers, 4000), np.int32),
        # Sums that fit, and sums that do not, of which the mean does.
        "uint8": rng.integers(0, 60, (num_workers, 5), np.uint8),
        "large_uint8": rng.integers(200, 256, (num_workers, 5), np.uint8),
        "large_int16": rng.integers(-(2**15), -(2**14), (num_workers, 5), np.int16),
        "bool": rng.random((num_workers, 50)) < 0.3,
        "complex64": (floats(30) + 1j * floats(30)).astype(np.complex64),
    }


@pytest.fixture(scope="module")
def mixed():
    tree = mixed_tree(4)
    mean = simulated(lambda key, tree: dq.pmean(tree, "data", key=key, method=STOCHASTIC))
    return tree, bf16(KEY, tree), mean(KEY, tree)


def test_structure_shapes_and_dtypes_are_kept(mixed):
    tree, *results = mixed
    for result in results:
        assert described(result) == described(tree)
        assert_replicated(result)


def test_leaves_that_are_not_compressed_are_exact(mixed):
    tree, total, mean = mixed
    for name in ("int32", "uint8", "large_uint8", "large_int16"):
        # Like jax.lax, a sum wraps around where it does not fit. A mean is floored.
        expected = tree[name].sum(axis=0, dtype=tree[name].dtype)
        np.testing.assert_array_equal(total[name][0], expected)
        wide = tree[name].sum(axis=0, dtype=np.int64)
        np.testing.assert_array_equal(mean[name][0], wide // 4)
        assert np.any(wide % 4 != 0)
    assert np.all(mean["large_uint8"] >= 200)
    np.testing.assert_allclose(total["complex64"][0], tree["complex64"].sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(mean["complex64"], total["complex64"] / np.complex64(4))
    for result in (total, mean):
        np.testing.assert_array_equal(result["bool"][0], tree["bool"].any(axis=0))
    assert total["bool"][0].any()
    assert not total["bool"][0].all()
    # Half precision is summed in float32 and rounded once.
    exact = np.asarray(tree["small_bf16"], np.float32).sum(axis=0)
    dtype = tree["small_bf16"].dtype
    np.testing.assert_array_equal(np.asarray(total["small_bf16"][0]), exact.astype(dtype))
    np.testing.assert_array_equal(np.asarray(mean["small_bf16"][0]), (exact / 4).astype(dtype))


@pytest.mark.parametrize("name", ("f32", "bf16", "f16"))
def test_floats_are_compressed_at_their_own_precision(mixed, name):
    tree, total, mean = mixed
    truth = np.asarray(tree[name], np.float64).sum(axis=0)
    # The rounding to bfloat16 at every hop, and once more to the dtype of the leaf.
    assert 1e-6 < vnmse(np.asarray(total[name][0], np.float64), truth) < 2e-5
    assert 1e-6 < vnmse(np.asarray(mean[name][0], np.float64), truth / 4) < 5e-5


@pytest.mark.parametrize("exact_below", (0, 1 << 20), ids=("compressed", "exact"))
def test_a_mean_that_fits_comes_from_a_sum_that_does_not(exact_below):
    """The sum is divided before it is cast to the dtype of its leaf."""
    half = np.full((4, 2048), 3e4, np.float16)  # up to 6.5e4

    def local(key, tree):
        return dq.pmean(tree, "data", dq.Compression("bf16", exact_below=exact_below), key=key)

    result = simulated(local)(KEY, half)
    assert result.dtype == np.float16
    np.testing.assert_allclose(np.asarray(result, np.float32), 3e4, rtol=2**-7)
    with np.errstate(over="ignore"):
        assert np.isinf(half.sum(axis=0)).all()


@manual
def test_a_mesh_takes_the_same_trees(data_mesh, mixed, check_vma):
    tree, total, _ = mixed
    result = on_mesh(local_bf16, data_mesh(4), check_vma=check_vma)(KEY, tree)
    assert described(result) == described(total)
    for ours, expected in zip(jax.tree.leaves(result), jax.tree.leaves(total), strict=True):
        # Small sums of floats may be associated differently; all others are the same bits.
        exact = ours[0].size >= 1024 or not jnp.issubdtype(ours.dtype, jnp.inexact)
        np.testing.assert_allclose(
            np.asarray(ours, np.complex128),
            np.asarray(expected, np.complex128),
            rtol=0 if exact else 2 * float(jnp.finfo(ours.dtype).eps),
        )
    assert_replicated(result)


@pytest.mark.parametrize("where", ("simulated", "vma", "no_vma"))
def test_python_numbers_and_constants_count_once_per_worker(data_mesh, where):
    """Floats are summed too, where types do not say that they are equal."""

    def local(key, gradient):
        constants = {"int": 3, "bool": True, "numpy": np.int32(5), "array": jnp.arange(3)}
        constants |= {"float": 0.5, "complex": 2j} if where == "simulated" else {}
        return local_stochastic(key, {"g": gradient, **constants})

    mesh = data_mesh(4)
    here = where == "simulated"
    run = simulated(local) if here else on_mesh(local, mesh, check_vma=where == "vma")
    result = run(KEY, np.ones((4, 8), np.float32))
    wanted = {"int": 12, "numpy": 20, "bool": True, "array": [0, 4, 8], "float": 2, "complex": 8j}
    assert {name: leaf.tolist() for name, leaf in result.items() if name != "g"} == {
        name: [value] * 4 for name, value in wanted.items() if name in result
    }


def test_float0_leaves_pass_untouched():
    """`jax.grad` with `allow_int=True` makes them for integer parameters."""

    def local(key, x):
        tokens = {"w": x, "ids": jnp.arange(3)}
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(tokens)
        result = local_stochastic(key, grads)
        assert result["ids"].dtype == jax.dtypes.float0
        assert result["ids"].shape == (3,)
        return result["w"]

    np.testing.assert_array_equal(simulated(local)(KEY, np.ones((2, 4), np.float32)), 4.0)


def test_double_precision_is_kept_where_exact_and_compressed_through_single():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        tree = {"small": 1 + rng.random((4, 10)) * 2.0**-40, "large": rng.random((4, 8192)) - 0.5}
        result = simulated(local_bf16)(jax.random.key(0), tree)
        assert result["small"].dtype == result["large"].dtype == np.float64
        np.testing.assert_allclose(result["small"][0], tree["small"].sum(axis=0), rtol=2.0**-50)
        assert 1e-6 < vnmse(result["large"][0], tree["large"].sum(axis=0)) < 2e-5


# --------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("exact_below", (0, 9520, 9521, 1 << 20))
def test_exact_below_moves_the_line(exact_below):
    """Also past the smallest leaves that there are: a scalar, and one without elements."""

    def local(key, tree):
        return dq.psum(tree, "data", dq.Compression(STOCHASTIC, exact_below=exact_below), key=key)

    tree = tree_of(3) | {"scalar": np.ones(3, np.float32), "none": np.ones((3, 0), np.float32)}
    tree["empty_f16"] = np.ones((3, 0), np.float16)
    result = simulated(local)(KEY, tree)
    compressed = {
        name
        for name, leaf in tree.items()
        if leaf.size and not np.allclose(result[name][0], leaf.sum(axis=0), rtol=1e-5, atol=1e-8)
    }
    # The sizes are 20480, 9520 and 40. The scalar has few bits, and so stays itself.
    lines = {0: {"kernel", "embedding", "bias"}, 9520: {"kernel", "embedding"}, 9521: {"kernel"}}
    assert compressed == lines.get(exact_below, set())
    assert result["scalar"].tolist() == [3] * 3
    assert result["none"].shape == result["empty_f16"].shape == (3, 0)
    assert result["empty_f16"].dtype == np.float16


every_collective = pytest.mark.parametrize("name", COLLECTIVES)


@every_collective
def test_leaves_that_a_policy_keeps_exact_change_nothing_else(name):
    reduce, exact = COLLECTIVES[name]
    tree = {"embedding": of_workers(0, 4, 9000), "kernel": of_workers(1, 4, 8192)}
    policies = (
        {"embedding": "uncompressed", ".*": STOCHASTIC},
        lambda path, leaf: "uncompressed" if path == "embedding" else STOCHASTIC,
    )

    def run(tree, method=STOCHASTIC):
        return simulated(lambda key, tree: reduce(tree, "data", key=key, method=method))(KEY, tree)

    expected = simulated(lambda key, tree: exact(tree, "data"))(KEY, tree)
    compressed = run(tree)
    alone = run({"kernel": tree["kernel"]})
    for policy in policies:
        found = run(tree, policy)
        assert_same_bits(found["kernel"], alone["kernel"])
        np.testing.assert_allclose(found["embedding"], expected["embedding"], rtol=1e-5, atol=1e-9)
    for leaf, truth in expected.items():
        assert 1e-6 < vnmse(compressed[leaf], truth) < 1e-4
    with pytest.raises(ValueError, match="no pattern for the leaf 'embedding'"):
        run(tree, {"kernel": STOCHASTIC})


@pytest.mark.parametrize("dtype", ("bool", "int8", "uint16", "int32", "float16", "float64"))
def test_parts_of_an_exact_sum_keep_the_digits_of_their_type(dtype):
    """Integers wrap, a boolean says whether any is True, and small floats are added as float32."""
    values = np.random.default_rng(0).normal(size=(4, 64)) * 60
    values = values > 50 if dtype == "bool" else values.astype(dtype)
    expected = {
        "bool": values.any(0),
        "float16": values.astype(np.float32).sum(0).astype(dtype),
    }.get(dtype, values.sum(0, dtype=dtype))

    def local(key, leaf):
        return dq.psum_scatter(leaf, "data", key=key, method="exact", tiled=True)

    with jax.enable_x64(dtype == "float64"):
        found = np.asarray(simulated(local)(KEY, jnp.asarray(values)))
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.reshape(-1), expected, rtol=1e-15 if dtype == "float64" else 0, atol=1e-12
    )


@pytest.mark.parametrize("name", ("psum", "pmean", "psum_scatter"))
def test_a_gradient_through_a_sum_is_refused(name):
    def total(local):
        mapped = functools.partial(COLLECTIVES[name][0], axis_name="data", key=jax.random.key(0))
        return jax.vmap(mapped, axis_name="data")(local).sum()

    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(total)(jnp.ones((2, 4096)))


# ------------------------------------------------------------------- non-finite values, odd meshes


def test_a_row_that_overflows_on_its_way_is_not_finite_in_the_end():
    gradients = of_workers(0, 3, 3 * 256 * 64)
    gradients[:, 10_000] = 2e38
    run = simulated(lambda key, tree: dq.psum(tree, "data", TWO_WIDTHS, key=key))
    result = np.asarray(run(KEY, gradients))
    assert not np.isfinite(result[:, 10_000]).any()
    assert np.isfinite(result[:, :9_984]).all()


def test_shards_of_another_manual_axis_are_reduced_alone_with_noise_of_their_own():
    """Two manual axes: each column of a 2 x 4 mesh sums on its own."""
    mesh = mesh_of(model=2, data=4)
    shards = np.broadcast_to(of_workers(0, 4, 8192), (2, 4, 8192))

    def local(key, stacked):
        return local_stochastic(key, stacked[0, 0])[None]

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("model", "data")), out_specs=P("model"))
    )
    result = np.asarray(mapped(KEY, shards))
    truth = shards[0].sum(axis=0, dtype=np.float64)
    simulation = vnmse(stochastic(KEY, shards[0])[0], truth)
    for column in range(2):
        assert vnmse(result[column], truth) == pytest.approx(simulation, rel=0.1)
    assert np.mean(result[0] != result[1]) > 0.5


@pytest.mark.parametrize("size", (8192, 40), ids=("compressed", "exact"))
@every_collective
def test_leaves_that_differ_along_another_axis_keep_to_themselves(name, size):
    """One bucket for both, or one exact message, would make `same` differ along the other axis as
    well, which check_vma refuses: its result could not be returned as replicated.
    """
    reduce, exact = COLLECTIVES[name]
    mesh = mesh_of(data=2, model=2)
    tree = {"same": of_workers(0, 2, size), "other": of_workers(1, 4, size).reshape(2, 2, size)}

    def local(tree):
        leaves = {"same": tree["same"][0], "other": tree["other"][0, 0]}
        arguments = {"to": "invarying"} if name == "all_gather" else {}
        return reduce(leaves, "data", key=jax.random.key(0), method=STOCHASTIC, **arguments)

    # Whole results are the same on all workers of "data".
    over = () if name != "psum_scatter" else ("data",)
    results = {"same": P(over), "other": P(("model", *over))}
    specs = {"same": P("data"), "other": P("data", "model")}
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=results)
    result = jax.jit(mapped)(tree)

    def truth(leaf):  # [data, size]
        whole = simulated(lambda key, g: exact(g, "data"))(KEY, leaf)
        return np.asarray(whole).reshape(-1) if over else np.asarray(whole[0])

    found = {"same": result["same"], "other": np.split(np.asarray(result["other"]), 2)}
    bounds = (1e-6, 1e-4) if size >= 1024 else (-1, 1e-12)
    assert bounds[0] < vnmse(found["same"], truth(tree["same"])) < bounds[1]
    for column in range(2):
        expected = truth(tree["other"][:, column])
        assert bounds[0] < vnmse(found["other"][column], expected) < bounds[1]
