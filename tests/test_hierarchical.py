"""Two or three axes: exact on the fast ones, compressed on the slow one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import collectives
from tests.support.workers import TWO_CLASSES

HOSTS, LOCAL = 2, 4
AXES = ("hosts", "local")
KEY = jax.random.key(4)


@functools.cache
def mesh():
    return jax.make_mesh((HOSTS, LOCAL), AXES, axis_types=(AxisType.Auto,) * 2)


def gradients(size: int = 20_001) -> np.ndarray:
    return of_workers(9, HOSTS * LOCAL, size).reshape(HOSTS, LOCAL, size)


def simulated(fn):
    inner = jax.vmap(fn, axis_name="local")
    return jax.jit(jax.vmap(inner, axis_name="hosts"))


def on_mesh(fn, *, check_vma=True):
    mapped = jax.shard_map(
        lambda g: fn(g[0, 0])[None, None],
        mesh=mesh(),
        in_specs=P(*AXES),
        out_specs=P(*AXES),
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def reduce(g, **options):
    return dq.psum(g, AXES, key=KEY, **{"method": TWO_CLASSES, **options})


@pytest.mark.parametrize("topology", ("ring", "butterfly", "all_to_all"))
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
def test_all_replicas_hold_the_bits_of_the_simulation(topology, check_vma):
    local = functools.partial(reduce, topology=topology)
    result = np.asarray(simulated(local)(gradients()))
    assert (result == result[0, 0]).all()
    np.testing.assert_array_equal(on_mesh(local, check_vma=check_vma)(gradients()), result)
    truth = gradients().sum(axis=(0, 1), dtype=np.float64)
    assert 1e-5 < vnmse(result[0, 0], truth) < 0.02


def test_an_exact_method_gives_the_exact_sum():
    result = simulated(functools.partial(reduce, method="exact"))(gradients())
    truth = gradients().sum(axis=(0, 1), dtype=np.float64)
    np.testing.assert_allclose(result[0, 0], truth, atol=1e-6 * np.abs(truth).max())


def test_the_error_is_that_of_the_hosts_alone():
    """The exact sum inside a host costs no accuracy: 2 workers, not 8."""
    flat = gradients(160_000).reshape(-1, 160_000)
    truth = flat.sum(axis=0, dtype=np.float64)
    one_ring = jax.jit(
        jax.vmap(lambda g: dq.psum(g, "d", key=KEY, method=TWO_CLASSES), axis_name="d")
    )
    nested = vnmse(simulated(reduce)(gradients(160_000))[0, 0], truth)
    assert 1e-6 < nested < 0.7 * vnmse(one_ring(flat)[0], truth)


def test_parts_have_rounding_noise_of_their_own():
    """Equal parts of a gradient are rounded differently, or errors of parts would add up."""
    part = of_workers(1, HOSTS, 4 * 2560)[:, None, :2560]
    repeated = np.broadcast_to(np.tile(part, LOCAL), (HOSTS, LOCAL, LOCAL * 2560)) / LOCAL
    result = np.asarray(simulated(reduce)(repeated.astype(np.float32))[0, 0]).reshape(LOCAL, -1)
    assert all(np.any(result[i] != result[0]) for i in range(1, LOCAL))


def test_mean_dtypes_and_small_leaves():
    tree = {
        "w": jnp.asarray(gradients(8192), jnp.bfloat16),
        "bias": gradients(7),
        "n": np.ones((HOSTS, LOCAL, 3), np.int32),
    }
    local = functools.partial(dq.pmean, axis_name=AXES, key=KEY, method=TWO_CLASSES)
    result = simulated(lambda tree: local(tree))(tree)
    assert jax.tree.map(lambda x: x.dtype, result) == jax.tree.map(lambda x: x.dtype, tree)
    np.testing.assert_allclose(result["bias"][1, 2], tree["bias"].mean(axis=(0, 1)), rtol=1e-5)
    np.testing.assert_array_equal(result["n"], 1)
    truth = np.asarray(tree["w"], np.float64).mean(axis=(0, 1))
    assert 1e-5 < vnmse(result["w"][0, 0], truth) < 0.02


def test_the_report_is_the_compiled_program():
    leaf = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def local(g):
        return dq.psum(g[0, 0], AXES, key=KEY)

    mapped = jax.shard_map(local, mesh=mesh(), in_specs=P(*AXES), out_specs=P())
    stacked = jax.ShapeDtypeStruct((HOSTS, LOCAL, *leaf.shape), jnp.float32)
    found = collectives(jax.jit(mapped).lower(stacked).compile().as_text())
    report = dq.wire_report({"w": leaf}, (HOSTS, LOCAL))
    exact = [c for c in found if c.dtypes == {"f32"}]
    slow = sum(c.sent_bytes(HOSTS) for c in found if c.dtypes <= {"u8", "u16"})
    assert len(exact) == 2  # one to scatter the sums, one to gather the results
    assert slow == report.compressed_bytes == report.bytes_per_worker
    assert report.fast_bytes == 2 * (LOCAL - 1) * (1 << 20)
    assert report.bits == pytest.approx(5.0, rel=0.01)
    flat = dq.wire_report({"w": leaf}, HOSTS)
    assert report.bytes_per_worker == pytest.approx(flat.bytes_per_worker / LOCAL, rel=0.01)


def test_three_axes():
    g = of_workers(3, 8, 5000).reshape(2, 2, 2, 5000)
    names = ("sites", "hosts", "local")
    fn = functools.partial(dq.psum, axis_name=names, key=KEY, method="exact")
    for name in reversed(names):
        fn = jax.vmap(fn, axis_name=name)
    result = np.asarray(jax.jit(fn)(g))
    truth = g.sum(axis=(0, 1, 2), dtype=np.float64)
    np.testing.assert_allclose(result[1, 0, 1], truth, atol=1e-6 * np.abs(truth).max())
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((4096,), jnp.float32)}, (2, 2, 2))
    assert report.fast_bytes == 8 * 2048 + 8 * 1024


def test_value_and_grad_and_the_optimizer_take_several_axes():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)).astype(np.float32)}
    batch = rng.normal(size=(16, 64)).astype(np.float32)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    expected = jax.grad(loss)(params, batch)["w"]
    grad_fn = dq.value_and_grad(loss, mesh=mesh(), axis_name=AXES, method=TWO_CLASSES)
    value, grads = grad_fn(params, batch, key=KEY)
    assert value == pytest.approx(float(loss(params, batch)), rel=1e-5)
    assert 1e-6 < vnmse(grads["w"], expected) < 0.02

    optimizer = optax.chain(dq.all_reduce_gradients(AXES, method=TWO_CLASSES), optax.sgd(1.0))

    def step(params, x):
        local = jax.tree.map(lambda p: jax.lax.pcast(p, AXES, to="varying"), params)
        updates, _ = optimizer.update(jax.grad(loss)(local, x), optimizer.init(params))
        return updates

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(AXES)), out_specs=P())
    assert 1e-6 < vnmse(-jax.jit(mapped)(params, batch)["w"], expected) < 0.02


@pytest.mark.parametrize("axis_name", ((), ("hosts", "hosts")))
def test_axes_that_are_none_or_the_same(axis_name):
    with pytest.raises(ValueError, match="does not name different axes"):
        simulated(lambda g: dq.psum(g, axis_name, key=KEY))(gradients(2000))
