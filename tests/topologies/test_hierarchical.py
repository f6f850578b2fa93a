"""Two or three axes: exact on the fast ones, compressed on the slow one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._buckets.axes import find_axes
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC, CountingZeros, described, mapped, mesh_of, over

HOSTS, LOCAL = 2, 4
AXES = ("hosts", "local")
KEY = jax.random.key(4)


@functools.cache
def mesh():
    return mesh_of(hosts=HOSTS, local=LOCAL)


def test_a_worker_of_three_fast_axes_knows_its_part():
    """And parts that are gathered are in their places again."""
    sizes = {"slow": 1, "a": 2, "b": 3, "c": 4}
    size, part_size = 90, 4

    def local(flat):
        axes = find_axes(tuple(sizes))
        part = axes.scatter(flat, part_size)
        index = 0
        for axis in reversed(axes.fast):
            index = index * axis.size + axis.index
        place = index * part_size + jnp.arange(part_size)
        return part, place, axes.gather(part, size)

    for name, count in reversed(sizes.items()):
        local = jax.vmap(local, in_axes=None, axis_name=name, axis_size=count)
    part, place, whole = jax.jit(local)(jnp.arange(1.0, size + 1))
    expected = np.where(place < size, 24 * (place + 1), 0)
    np.testing.assert_array_equal(part, expected)
    np.testing.assert_array_equal(np.unique(place), np.arange(24 * part_size))
    np.testing.assert_array_equal(whole[0, 0, 0, 0], 24 * np.arange(1, size + 1))


def gradients(size: int = 20_001) -> np.ndarray:
    return of_workers(9, HOSTS * LOCAL, size).reshape(HOSTS, LOCAL, size)


simulated = functools.partial(over, AXES)


def reduce(g, method=dq.methods.BlockInt(block=256)):
    return dq.psum(g, AXES, method, key=KEY)


def test_values_that_are_not_finite_stay_in_their_super_group():
    """Parts of the fast axes are whole super-groups, of which a block is as large as one here."""
    values, places = gradients(), np.array([0, 10_000, 20_000])
    values[1, 2, places] = np.inf
    result = np.asarray(simulated(reduce)(values))
    bad = ~np.isfinite(result)
    assert bad[:, :, places].all()
    assert {*np.flatnonzero(bad.any(axis=(0, 1))) // 256} == {*places // 256}


def test_the_error_is_that_of_the_hosts_alone():
    """The exact sum inside a host costs no accuracy: 2 workers, not 8."""
    flat = gradients().reshape(HOSTS * LOCAL, -1)
    truth = flat.sum(axis=0, dtype=np.float64)
    local = functools.partial(dq.psum, axis_name="d", key=KEY, method=STOCHASTIC)
    one_ring = vnmse(jax.jit(jax.vmap(local, axis_name="d"))(flat)[0], truth)
    nested = simulated(functools.partial(reduce, method=STOCHASTIC))(gradients())
    assert 1e-6 < vnmse(nested[0, 0], truth) < 0.7 * one_ring


def test_parts_have_rounding_noise_of_their_own():
    """Equal parts of a gradient are rounded differently, or errors of parts would add up."""
    part = of_workers(1, HOSTS, 4 * 2560)[:, None, :2560]
    repeated = np.broadcast_to(np.tile(part, LOCAL), (HOSTS, LOCAL, LOCAL * 2560)) / LOCAL
    local = functools.partial(reduce, method=STOCHASTIC)
    result = np.asarray(simulated(local)(repeated.astype(np.float32))[0, 0]).reshape(LOCAL, -1)
    assert all(np.mean(result[i] != result[0]) > 0.1 for i in range(1, LOCAL))


def test_mean_dtypes_and_small_leaves():
    tree = {
        "w": jnp.asarray(gradients(8192), jnp.bfloat16),
        "bias": gradients(7),
        "n": np.full((HOSTS, LOCAL, 3), 200, np.uint8),
    }
    local = functools.partial(dq.pmean, axis_name=AXES, key=KEY, method="bf16")
    result = simulated(local)(tree)
    assert described(result) == described(tree)
    np.testing.assert_allclose(result["bias"][1, 2], tree["bias"].mean(axis=(0, 1)), rtol=1e-5)
    np.testing.assert_array_equal(result["n"], 200)
    truth = np.asarray(tree["w"], np.float64).mean(axis=(0, 1))
    assert 1e-6 < vnmse(result["w"][0, 0], truth) < 5e-5


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_sums_travel_in_float32_over_fast_axes_and_results_in_their_dtype(dtype):
    leaf = jax.ShapeDtypeStruct((1 << 18,), dtype)

    def local(g):
        return dq.psum(g[0, 0], AXES, key=KEY, method="mxfp8")

    mapped = jax.shard_map(local, mesh=mesh(), in_specs=P(*AXES), out_specs=P())
    stacked = jax.ShapeDtypeStruct((HOSTS, LOCAL, *leaf.shape), dtype)
    # Before XLA:CPU widens narrow floats in its collectives.
    text = jax.jit(mapped).lower(stacked).as_text()
    gathered = re.findall(r"stablehlo\.all_gather.*-> tensor<[\dx]*x(\w+)>", text)
    assert {"float32": "f32", "bfloat16": "bf16"}[dtype] in gathered
    report = dq.wire_report({"w": leaf}, (HOSTS, LOCAL), method="mxfp8")
    assert report.fast_bytes == (LOCAL - 1) * leaf.size // LOCAL * (4 + leaf.dtype.itemsize)
    assert report.bits == pytest.approx(8.25, rel=0.02)
    flat = dq.wire_report({"w": leaf}, HOSTS, method="mxfp8")
    assert report.bytes_per_worker == pytest.approx(flat.bytes_per_worker / LOCAL, rel=0.01)


def test_exact_leaves_are_counted_over_the_slow_axis_like_an_exact_method():
    tree = {"w": jax.ShapeDtypeStruct((1 << 18,), jnp.float32)}
    exact, uncompressed = (
        dq.wire_report(tree, (4, 8), method=method) for method in ("exact", "uncompressed")
    )
    part = 2 * 3 / 4 * 4 * (1 << 18) / 8
    assert exact.bytes_per_worker == uncompressed.bytes_per_worker == part
    assert exact.ratio_f32 == uncompressed.ratio_f32 == 1
    assert uncompressed.leaves[0].bytes == uncompressed.exact_bytes == part


def test_a_bucket_waits_until_those_before_it_are_whole():
    """With the fast axes too: the first leaf needs the gathers of the results behind it."""

    how = dq.Compression("bf16", bucket_bytes=1, bucketing="in_order")

    def transfers_for(names):
        def local(stacked):
            mine = jax.tree.map(lambda leaf: leaf[0, 0], stacked)
            result = dq.psum(mine, AXES, how, key=KEY)
            return [result[name] for name in names]

        mapped = jax.shard_map(local, mesh=mesh(), in_specs=P(*AXES), out_specs=P())
        tree = dict.fromkeys("ab", jax.ShapeDtypeStruct((HOSTS, LOCAL, 8192), jnp.float32))
        return len(collectives(jax.jit(mapped).lower(tree).compile().as_text()))

    assert transfers_for("a") == transfers_for("ab") == 2 * transfers_for("b") > 0


def test_metrics_are_means_over_the_parts():
    """Each part of a bucket has a share of its own that is zero."""
    rng = np.random.default_rng(0)
    size, block = LOCAL * 2560, 256
    leaf = np.zeros((HOSTS, LOCAL, size), np.float32)
    # Parts with 2, 4, 6 and 8 blocks of 10 that are not zero.
    for part in range(LOCAL):
        first = part * 2560
        filled = 2 * (part + 1) * block
        leaf[:, :, first : first + filled] = rng.normal(size=(HOSTS, LOCAL, filled))
    reduce = dq.all_reduce_gradients(AXES, method=CountingZeros())

    def local(g):
        state = reduce.update(g, reduce.init(g))[1]
        return state.metrics["zeros"]

    result = np.asarray(simulated(local)(leaf))
    expected = np.mean([(10 - filled) / 10 for filled in (2, 4, 6, 8)])
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_three_axes():
    g = of_workers(3, 8, 5000).reshape(2, 2, 2, 5000)
    names = ("sites", "hosts", "local")
    fn = functools.partial(dq.psum, axis_name=names, key=KEY, method="exact")
    result = np.asarray(over(names, fn)(g))
    truth = g.sum(axis=(0, 1, 2), dtype=np.float64)
    np.testing.assert_allclose(result[1, 0, 1], truth, atol=1e-6 * np.abs(truth).max())
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((4096,), jnp.float32)}, (2, 2, 2))
    assert report.fast_bytes == 8 * 2048 + 8 * 1024


def test_the_optimizer_takes_several_axes():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)).astype(np.float32)}
    batch = rng.normal(size=(16, 64)).astype(np.float32)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    expected = jax.grad(loss)(params, batch)["w"]
    optimizer = optax.chain(dq.all_reduce_gradients(AXES, method="bf16"), optax.sgd(1.0))

    def step(params, x):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, AXES, to="varying"), params)
        updates, _ = optimizer.update(jax.grad(loss)(local, x), optimizer.init(params))
        return updates

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(AXES)), out_specs=P())
    assert 1e-7 < vnmse(-jax.jit(mapped)(params, batch)["w"], expected) < 2e-5


@pytest.mark.parametrize("axis", AXES)
def test_a_key_that_differs_along_any_axis_is_refused(axis):
    def local(g):
        key = jax.random.fold_in(KEY, jax.lax.axis_index(axis))
        return dq.psum(g, AXES, key=key, method="bf16")

    with pytest.raises(ValueError, match=f"key differs between the workers of axis '{axis}'"):
        mapped(local, mesh())(gradients(2000))


@pytest.mark.parametrize("axis", AXES)
def test_a_leaf_that_is_summed_over_any_axis_is_refused(axis):
    with pytest.raises(ValueError, match=f"does not vary over axis '{axis}'"):
        mapped(lambda g: reduce(jax.lax.psum(g, axis)), mesh())(gradients(2000))
