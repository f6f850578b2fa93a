"""A mean in two halves is as good as one all-reduce: rows are dealt over the shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dynamiq_jax as dq
from dynamiq_jax.topologies import AllToAll, Ring
from dynamiq_research import THC, Pipelined
from dynamiq_research.pipelined.carrying import num_carried
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import call_on

ROW, SIZE = 256, 2**17
CORRELATED = dq.DynamiQ(bits=4, rounding="correlated")
ONE_BUCKET = dq.Compression(bucket_bytes=2**30)


def white(workers: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    own, common = rng.normal(size=(workers, SIZE)), rng.normal(size=SIZE)
    return (own + common).astype(np.float32)


def regions(workers: int) -> np.ndarray:
    """Four consecutive regions of other scales."""
    return white(workers) * np.repeat(np.float32([1, 0.1, 0.03, 0.01]), SIZE // 4)


def columns(workers: int) -> np.ndarray:
    """A matrix of as many rows of 256 in its width as there are workers, of which one is large."""
    large = np.arange(SIZE) // ROW % workers == workers - 1
    return white(workers) * np.where(large, 1, 0.01).astype(np.float32)


def halves(pipelined, tree):
    start = pipelined.gather(pipelined.init(jax.tree.map(jnp.zeros_like, tree)))
    return pipelined.gather(pipelined.scatter(tree, start))


def pipelined_by(
    method=CORRELATED, topology="ring", axis_name="data", options=ONE_BUCKET, **fields
):
    return Pipelined(
        optimizer=optax.sgd(1.0),
        axis_name=axis_name,
        method=dataclasses.replace(options, method=method, topology=topology),
        **fields,
    )


def mean_by_halves(tree, **choices):
    """Means of all workers, and the norm of the first."""
    run = functools.partial(halves, pipelined_by(**choices))
    updated = jax.jit(jax.vmap(run, axis_name="data"))(tree)
    return jax.tree.map(lambda leaf: -np.asarray(leaf), updated.params), updated.gradient_norm[0]


def mean_by_all_reduce(tree, method=CORRELATED, topology="ring", options=ONE_BUCKET):
    arguments = {"method": dataclasses.replace(options, method=method, topology=topology)}

    def mean(tree):
        return dq.pmean(tree, "data", key=jax.random.key(0), **arguments)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(mean, axis_name="data"))(tree))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "made, workers, topology",
    (
        (regions, 4, "ring"),
        (regions, 2, "all_to_all"),
        pytest.param(columns, 4, "butterfly", marks=pytest.mark.slow),
        pytest.param(columns, 8, "ring", marks=pytest.mark.slow),
    ),
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_halves_have_the_error_of_the_whole(made, workers, topology):
    """Whatever the regions and the period of the values, and not because they are exact."""
    gradients = made(workers)
    truth = gradients.mean(0, dtype=np.float64)
    means, _ = mean_by_halves(gradients, topology=topology)
    assert all(np.array_equal(means[0], other) for other in means)  # replicas
    whole = mean_by_all_reduce(gradients, topology=topology)
    assert 1e-5 < (of_whole := vnmse(whole[0], truth)) < 0.1
    # Two chunks in one shard take noise of their own.
    most = 1.15 if topology in ("ring", "all_to_all", "butterfly") else 1.3
    assert 0.85 < vnmse(means[0], truth) / of_whole < most


@pytest.mark.slow
def test_leaves_of_other_scales_share_the_bits():
    """Also if the gradients have heavy tails."""
    gradients = of_workers(0, 4, SIZE)
    tree = {"a": gradients[:, : SIZE // 2], "b": np.float32(0.03) * gradients[:, SIZE // 2 :]}
    truth = np.concatenate([leaf.mean(0, dtype=np.float64) for leaf in tree.values()])
    errors = [
        vnmse(np.concatenate([found["a"][0], found["b"][0]]), truth)
        for found in (mean_by_halves(tree)[0], mean_by_all_reduce(tree))
    ]
    assert 1e-5 < errors[1] < 0.1 and 0.85 < errors[0] / errors[1] < 1.15


def test_no_byte_is_added():
    """To those of an all-reduce, but the norms of the sums that an all-gather sends too."""
    leaf = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    report = pipelined_by().wire_report(leaf, 4)
    whole = dq.wire_report(leaf, 4, method=dq.Compression(CORRELATED, "ring")).bytes_per_worker
    norms = 3 * 2 * SIZE // ROW // 4
    assert report.scattered_bytes + report.gathered_bytes == whole + norms


@pytest.mark.parametrize(
    "method",
    ("exact", pytest.param(CORRELATED, marks=pytest.mark.slow), THC()),
    ids=("exact", "dynamiq", "thc"),
)
def test_three_axes(method):
    """Parts of two fast axes of different sizes, and padding, which is in no norm."""
    sizes, size = (2, 3, 2), 5000
    gradients = np.random.default_rng(1).normal(size=(*sizes, size)).astype(np.float32)
    pipelined = pipelined_by(method, axis_name=("slow", "middle", "fast"))
    run = functools.partial(halves, pipelined)
    for name in ("fast", "middle", "slow"):
        run = jax.vmap(run, axis_name=name)
    updated = jax.jit(run)(gradients)
    found = -np.asarray(updated.params).reshape(-1, size)
    assert all(np.array_equal(found[0], other) for other in found)
    truth = gradients.mean((0, 1, 2), dtype=np.float64)
    exact = method == "exact"
    assert vnmse(found[0], truth) < (1e-12 if exact else 0.1)
    norms = np.asarray(updated.gradient_norm).reshape(-1)
    np.testing.assert_allclose(norms, np.linalg.norm(truth), rtol=1e-5 if exact else 0.05)


@pytest.mark.slow
def test_a_loop_over_equal_buckets_gives_the_same_bits():
    leaves = np.split(regions(2)[:, : 2**14], 2, axis=1)
    options = [dq.Compression(bucket_bytes=2**15, unrolled_buckets=count) for count in (0, 4)]
    looped, alone = (mean_by_halves(leaves, options=each) for each in options)
    jax.tree.map(np.testing.assert_array_equal, looped, alone)


@pytest.mark.slow
def test_errors_of_the_halves_cancel():
    """Those of correlated noise: it is the noise of an all-reduce, in the same order of rows."""
    gradients = white(4)
    truth = gradients.mean(0, dtype=np.float64)
    correlated, independent = (
        vnmse(mean_by_halves(gradients, method=dq.DynamiQ(bits=4, rounding=rounding))[0][0], truth)
        for rounding in ("correlated", "independent")
    )
    assert 0.6 < correlated / independent < 0.8


def test_nan_of_one_worker_surfaces_in_its_row():
    gradients = white(2)
    gradients[1, 1000] = np.nan
    means, _ = mean_by_halves(gradients)
    assert np.all(np.isnan(means[:, 1000])) and np.mean(np.isnan(means)) <= ROW / SIZE


@pytest.mark.parametrize(
    ("topology", "workers", "carries"),
    [(Ring(), 8, True), (Ring(), 2, True), (AllToAll(), 4, True), (AllToAll(), 16, False)],
)
def test_norms_of_rows_are_carried_where_errors_can_cancel(topology, workers, carries):
    """Only an all-to-all of many workers orders the rows of sums anew."""
    call = call_on(workers * 4 * ROW, workers, topology, collective="psum_scatter")
    assert num_carried(CORRELATED, call) == (4 if carries else 0)
    assert num_carried(dq.DynamiQ(rounding="nearest"), call) == 0
    assert num_carried(dq.methods.BF16(), call) == 0
