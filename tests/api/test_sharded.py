"""The two halves of the all-reduce."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.topologies import TOPOLOGIES
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import STOCHASTIC, TWO_WIDTHS, call_on, simulated

N = 4
KEY = jax.random.key(11)
METHODS = {"dynamiq": TWO_WIDTHS, "stochastic": STOCHASTIC, "exact": dq.methods.Exact()}
# Of a sum of four workers: least and most.
ERRORS = {"dynamiq": (1e-6, 5e-3), "stochastic": (1e-6, 1e-4), "exact": (-1, 1e-12)}


def gradient(shape=(96, 200)) -> np.ndarray:
    return of_workers(2, N, int(np.prod(shape))).reshape(N, *shape)


@functools.cache
def scattered(method: str, topology: str):
    choice = dq.Compression(METHODS[method], topology)
    return simulated(lambda key, g: dq.psum_scatter(g, "data", choice, key=key, tiled=True))


# ---------------------------------------------------------------------------------- psum_scatter


@pytest.mark.parametrize(
    ("method", "topology"),
    [*(("stochastic", name) for name in TOPOLOGIES), ("dynamiq", "ring"), ("exact", "butterfly")],
)
def test_parts_of_the_sum_are_close_and_unbiased(method, topology):
    """The error of the mean over k keys falls as 1 / k; correlated rounding keeps a few percent."""
    g, keys = gradient(), 1 if method == "exact" else 24
    truth = g.sum(axis=0, dtype=np.float64).reshape(N, 24, 200)
    run = scattered(method, topology)
    results = [np.asarray(run(jax.random.key(k), g)) for k in range(keys)]
    assert (results[0].shape, results[0].dtype) == (truth.shape, np.float32)
    single = np.mean([vnmse(result, truth) for result in results])
    least, most = ERRORS[method]
    assert least < single < most
    if keys > 1:
        gain = single / vnmse(np.mean(results, axis=0, dtype=np.float64), truth)
        assert (0.8 if method == "stochastic" else 0.4) * keys < gain < 1.25 * keys


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dimension", (0, 1, 2))
@pytest.mark.parametrize("tiled", (True, False))
def test_shapes_and_dtypes_are_those_of_lax(dimension, tiled):
    shape = [8, 12, 40]
    shape[dimension] = 2 * N if tiled else N
    g = gradient(tuple(shape))
    tree = {dtype: jnp.asarray(g, dtype) for dtype in ("float32", "bfloat16", "float16")}
    arguments = {"scatter_dimension": dimension, "tiled": tiled}

    def local(key, g):
        method = dq.Compression("bf16", exact_below=0)
        return dq.psum_scatter(g, "data", method, key=key, **arguments)

    ours = simulated(local)(KEY, tree)
    theirs = simulated(lambda key, g: jax.lax.psum_scatter(g, "data", **arguments))(KEY, tree)
    for dtype, leaf in ours.items():
        assert (leaf.shape, leaf.dtype) == (theirs[dtype].shape, dtype)
        assert 0 < vnmse(leaf, theirs[dtype]) < 1e-4


@pytest.mark.parametrize(("tiled", "shape"), ((True, (3, 2)), (False, (3,))))
def test_a_leaf_that_holds_nothing_is_scattered_too(tiled, shape):
    def local(key, g):
        nothing = np.zeros((3, 2 * N if tiled else N), jax.dtypes.float0)
        found = dq.psum_scatter(nothing, "data", key=key, scatter_dimension=1, tiled=tiled)
        assert (found.shape, found.dtype) == (shape, jax.dtypes.float0)
        return g

    simulated(local)(KEY, gradient())


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    (
        ((10, 8), {"tiled": True}, "dimension 0 does not scatter over 4 workers"),
        ((8, 8), {}, "Give 4, or tiled=True"),
        ((8, 8), {"scatter_dimension": 2, "tiled": True}, "scatter_dimension=2"),
        ((8, 8), {"scatter_dimension": True, "tiled": True}, "scatter_dimension=True"),
        ((8, 8), {"tiled": "no"}, "tiled='no' is not possible"),
    ),
)
def test_leaves_that_do_not_scatter_are_refused(shape, options, words):
    with pytest.raises(ValueError, match=words):
        simulated(lambda key, g: dq.psum_scatter(g, "data", key=key, **options))(
            KEY, gradient(shape)
        )


# ------------------------------------------------------------------------------------ all_gather


@pytest.mark.parametrize("axis", (0, 1, 2, -1))
@pytest.mark.parametrize("tiled", (True, False))
def test_a_gather_has_the_shapes_of_lax_and_the_same_bits_everywhere(axis, tiled):
    parts = gradient((6, 10, 40))

    def local(key, part):
        return dq.all_gather(part, "data", key=key, method="bf16", axis=axis, tiled=tiled)

    ours = np.asarray(simulated(local)(KEY, parts))
    theirs = simulated(lambda key, p: jax.lax.all_gather(p, "data", axis=axis, tiled=tiled))
    expected = np.asarray(theirs(KEY, parts))
    assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
    assert (ours == ours[0]).all()
    assert 1e-7 < vnmse(ours, expected) < 1e-5


def test_a_gather_by_the_default_method_is_close_and_the_same_everywhere():
    """Nothing averages errors out: the nearest level is the best."""
    parts = gradient((60, 100))

    def local(key, part):
        roundings = ({}, {"rounding": "nearest"}, {"rounding": "correlated"})
        return [dq.all_gather(part, "data", dq.DynamiQ(**each), key=key) for each in roundings]

    found, nearest, correlated = map(np.asarray, simulated(local)(KEY, parts))
    assert (found == found[0]).all()
    np.testing.assert_array_equal(found, nearest)
    assert 1e-4 < vnmse(found[0], parts) < 0.6 * vnmse(correlated[0], parts)


@pytest.mark.parametrize(
    ("axis", "tiled", "remedy"),
    (
        (2, True, "from -2 to 1"),
        (-3, True, "from -2 to 1"),
        (3, False, "from -3 to 2"),
        (0.0, True, "from -2 to 1"),
    ),
)
def test_a_gather_along_a_dimension_that_does_not_exist(axis, tiled, remedy):
    gather = functools.partial(dq.all_gather, axis_name="data", axis=axis, tiled=tiled)
    words = rf"axis={axis} is not a dimension.*tree\['w'\].*Give one {remedy}"
    with pytest.raises(ValueError, match=words):
        simulated(lambda key, g: gather({"w": g}, key=key))(KEY, gradient((8, 8)))


def test_a_gather_puts_every_leaf_where_it_was():
    """Two dtypes, so two buckets, one leaf between them that is exact, and one that is nothing."""
    parts = {
        "a": gradient((6, 5, 100)),
        "b": gradient((3, 2, 400)).astype(np.float16),
        "exact": np.arange(N * 6, dtype=np.int32).reshape(N, 2, 3),
        "kept": gradient((4, 4, 300)),
        "z": gradient((2, 2, 600)),
    }
    policy = {"kept": "uncompressed", "^[abz]$": STOCHASTIC}

    def local(key, tree):
        tree = {**tree, "nothing": np.zeros((2, 3), jax.dtypes.float0)}
        gathered = dq.all_gather(tree, "data", key=key, axis=-1, tiled=True, method=policy)
        nothing = gathered.pop("nothing")
        assert (nothing.shape, nothing.dtype) == ((2, 3 * N), jax.dtypes.float0)
        return gathered

    found = simulated(local)(KEY, parts)
    expected = simulated(
        lambda key, tree: {
            name: jax.lax.all_gather(leaf, "data", axis=leaf.ndim - 1, tiled=True)
            for name, leaf in tree.items()
        }
    )(KEY, parts)
    for name, leaf in expected.items():
        assert (found[name].shape, found[name].dtype) == (leaf.shape, leaf.dtype)
        error = vnmse(found[name], leaf)
        assert error == 0 if name in ("exact", "kept") else 1e-6 < error < 1e-4, name


def test_numbers_are_gathered_like_arrays():
    local = lambda key, g: dq.all_gather({"a": 2.5, "b": 3}, "data", key=key)  # noqa: E731
    found = simulated(local)(KEY, gradient())
    np.testing.assert_array_equal(found["a"][0], [2.5] * N)
    np.testing.assert_array_equal(found["b"][0], [3] * N)


# ------------------------------------------------------------------------------------------- both


def test_both_halves_may_have_one_key():
    """Noise that both shared would not average out: errors of many keys have to."""
    g = gradient((64, 64))[:2]
    truth = g.sum(axis=0, dtype=np.float64)

    def local(key, g):
        part = dq.psum_scatter(g, "data", key=key, tiled=True, method=STOCHASTIC)
        return dq.all_gather(part, "data", key=key, tiled=True, method=STOCHASTIC)

    run = simulated(local)
    results = [np.asarray(run(jax.random.key(k), g)[0], float) for k in range(64)]
    single = np.mean([vnmse(result, truth) for result in results])
    assert 48 < single / vnmse(np.mean(results, axis=0), truth) < 84  # 64 without shared noise


@pytest.mark.parametrize("method", (TWO_WIDTHS, STOCHASTIC))
def test_the_halves_cost_as_much_as_an_all_reduce_but_for_statistics_of_each(method):
    def cost(collective):
        return method.wire_cost(call_on(N * 2**18, N, collective=collective))

    half, other, whole = map(cost, ("psum_scatter", "all_gather", "all_reduce"))
    assert half.payload_bytes == other.payload_bytes == whole.payload_bytes
    assert half.statistics_bytes == whole.statistics_bytes
    # Two bytes a row, of every worker.
    assert other.statistics_bytes == (2 * (N - 1) * 1024 if method == TWO_WIDTHS else 0)


@pytest.mark.parametrize(
    ("half", "rows"), ((dq.psum_scatter, 48), (dq.all_gather, 192)), ids=("scatter", "gather")
)
def test_several_axes_are_refused_and_one_in_a_tuple_is_one(half, rows):
    def on(axes, g):
        return half(g, axes, key=KEY, tiled=True, method="bf16")

    g = gradient().reshape(2, 2, 96, 200)
    for axes in (("data",), "data"):
        found = jax.eval_shape(jax.vmap(functools.partial(on, axes), axis_name="data"), g[0])
        assert found.shape == (2, rows, 200)
    one = jax.vmap(functools.partial(on, ("hosts", "data")), axis_name="data")
    with pytest.raises(ValueError, match=r"\('hosts', 'data'\) names 2 axes"):
        jax.vmap(one, axis_name="hosts")(g)
