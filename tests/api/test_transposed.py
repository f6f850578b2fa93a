"""Compressed sums as transposes: `dq.pcast` of parameters, and the gradient of `dq.all_gather`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import STOCHASTIC

WORKERS, LAYERS, WIDTH = 4, 3, 48
KEY = jax.random.key(5)


def params():
    rng = np.random.default_rng(0)
    return {
        "layers": (rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32),
        "out": rng.normal(size=(WIDTH,)).astype(np.float32),
    }


def batch():
    return np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32)


def loss_fn(params, x, cast=lambda tree: tree, *, remat=False):
    """Layers under a scan, each cast in its body."""

    def layer(x, w):
        return jnp.tanh(x @ cast(w)), None

    body = jax.checkpoint(layer) if remat else layer
    x, _ = lax.scan(body, x, params["layers"])
    return jnp.mean((x @ cast(params["out"])) ** 2)


def gradients(mesh, *, check_vma: bool, remat: bool = False, **arguments):
    """By the transposed form, of which each layer is a sum of its own."""
    arguments = {"method": STOCHASTIC, "options": dq.Options(exact_below=100)} | arguments

    def local(params, x, key):
        cast = functools.partial(
            dq.pcast, axis_name="data", to="varying", mean=not check_vma, **{"key": key} | arguments
        )

        def loss(params):
            value = loss_fn(params, x, cast, remat=remat)
            return lax.pmean(value, "data") if check_vma else value

        return jax.grad(loss)(params)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)(params(), batch(), KEY)


@pytest.mark.parametrize("remat", (False, True), ids=("", "remat"))
@pytest.mark.parametrize("check_vma", (True, False), ids=("checked", "unchecked"))
def test_gradients_of_a_scan_over_layers_are_the_mean_of_the_batch(data_mesh, check_vma, remat):
    grads = gradients(data_mesh(WORKERS), check_vma=check_vma, remat=remat)
    expected = jax.grad(loss_fn)(params(), batch())
    assert 1e-7 < vnmse(grads["layers"], expected["layers"]) < 1e-4
    assert vnmse(grads["out"], expected["out"]) < 1e-10  # too small to be compressed
    for leaf in grads.values():
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1


def test_without_a_key_the_noise_follows_the_parameters(data_mesh):
    """Other parameters, if only one number of them differs, other noise; the same ones, the same.
    Each layer has its own.
    """
    method, own = STOCHASTIC, of_workers(0, WORKERS, 2 * 4096).reshape(WORKERS, 2, 4096)

    def local(params, own):
        def loss(params):
            cast = dq.pcast(params, "data", to="varying", key=None, method=method)
            return jnp.vdot(cast, own[0, 0])

        return jax.grad(loss)(params)

    mapped = jax.jit(
        jax.shard_map(local, mesh=data_mesh(WORKERS), in_specs=(P(), P("data")), out_specs=P())
    )
    weights = np.ones(4096, np.float32)
    other = np.nextafter(weights, np.float32(2))
    first, again, changed = mapped(weights, own), mapped(weights, own), mapped(other, own)
    np.testing.assert_array_equal(first, again)
    assert np.mean(np.asarray(first) != np.asarray(changed)) > 0.3
    truth = own[:, 0].sum(axis=0, dtype=np.float64)
    assert 1e-7 < vnmse(first, truth) < 1e-4


def test_the_noise_is_the_same_where_parameters_are_sharded():
    """A key from parameters is the same on all workers, also where no device has all of them."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def local(params, own):
        def loss(params):
            cast = dq.pcast(params, "data", to="varying", method=STOCHASTIC, specs=P("fsdp"))
            return jnp.vdot(cast, own[0])

        return jax.grad(loss)(params)[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    weights, own = np.linspace(0, 1, 8192, dtype=np.float32), of_workers(0, 2, 8192)
    one, other = np.asarray(jax.jit(mapped)(weights, own))
    np.testing.assert_array_equal(one, other)
    assert 1e-7 < vnmse(one, own.sum(axis=0, dtype=np.float64)) < 1e-4


def test_only_floating_leaves_have_gradients(data_mesh):
    def local(params, own):
        def loss(scale):
            cast = dq.pcast(params | {"scale": scale}, "data", to="varying", key=KEY)
            return cast["scale"] * own[0, 0] * cast["count"].astype(jnp.float32)

        return jax.grad(loss)(params["scale"])

    mapped = jax.shard_map(local, mesh=data_mesh(2), in_specs=(P(), P("data")), out_specs=P())
    tree = {"scale": jnp.float32(1), "count": jnp.int32(3)}
    assert float(mapped(tree, np.array([[1.0], [2.0]], np.float32))) == 9


def test_nothing_is_sent_for_leaves_that_are_frozen_or_unused(data_mesh):
    """A large frozen leaf beside a small one that learns, as with low-rank adapters."""
    mesh, own = data_mesh(WORKERS), of_workers(0, WORKERS, 8192)

    def local(learned, unused, frozen, own):
        def loss(learned, unused):
            tree = {"learned": learned, "unused": unused, "frozen": frozen}
            cast = dq.pcast(tree, "data", to="varying", method=STOCHASTIC)
            return jnp.vdot(cast["learned"], own[0]) + cast["frozen"].sum()

        return jax.grad(loss, argnums=(0, 1))(learned, unused)

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P())
    )
    args = np.ones(8192, np.float32), np.ones(65536, np.float32), np.ones(65536, np.float32), own
    grads, zeros = mapped(*args)
    assert 1e-7 < vnmse(grads, own.sum(axis=0, dtype=np.float64)) < 1e-4
    assert not np.any(zeros)
    report = dq.wire_report(args[0], WORKERS, method=STOCHASTIC)
    sent = sent_by_axes(mapped.lower(*args).compile().as_text(), mesh)
    assert sent[("data",)] == pytest.approx(report.bytes_per_worker, rel=0.05)


def test_other_casts_and_varying_parameters_are_refused(data_mesh):
    def cast(x, to="varying"):
        return dq.pcast({"w": x}, "data", to=to, key=KEY)

    mapped = functools.partial(
        jax.shard_map, mesh=data_mesh(2), in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(ValueError, match=r"tree\['w'\] varies over axis 'data' already"):
        mapped(cast)(jnp.ones(4))
    with pytest.raises(ValueError, match=r"to='reduced' is not supported"):
        mapped(functools.partial(cast, to="reduced"))(jnp.ones(4))


# ------------------------------------------------------------------------------------ all_gather


@pytest.mark.parametrize(("axis", "tiled"), ((0, True), (-1, True), (0, False)))
@pytest.mark.parametrize("check_vma", (True, False), ids=("checked", "unchecked"))
def test_the_transpose_of_a_gather_is_the_compressed_scatter(data_mesh, check_vma, axis, tiled):
    """Parameters live in parts; their gradients leave in the same parts, which are those of the
    whole sum.
    """
    shape = (WORKERS * 64, WORKERS * 16)
    own = of_workers(0, WORKERS, shape[0] * shape[1]).reshape(WORKERS, *shape)
    weights = np.random.default_rng(2).normal(size=shape).astype(np.float32)

    def local(part, own):
        part = part if tiled else part[0]
        own = own[0] if tiled else own[0].reshape(WORKERS, -1, shape[1])

        def loss(part):
            gathered = dq.all_gather(
                part, "data", key=KEY, axis=axis, tiled=tiled, method=STOCHASTIC
            )
            return jnp.vdot(gathered, own)

        grads = jax.grad(loss)(part)
        return grads if tiled else grads[None]

    stacked = weights if tiled else weights.reshape(WORKERS, -1, shape[1])
    split = P(None, "data") if axis == -1 else P("data")
    mapped = jax.shard_map(
        local,
        mesh=data_mesh(WORKERS),
        in_specs=(split, P("data")),
        out_specs=split,
        check_vma=check_vma,
    )
    grads = np.asarray(jax.jit(mapped)(stacked, own)).reshape(shape)
    assert 1e-7 < vnmse(grads, own.sum(axis=0, dtype=np.float64)) < 1e-4


def test_an_invarying_gather_is_not_differentiated(data_mesh):
    def local(part, own):
        def loss(part):
            whole = dq.all_gather(
                part, "data", key=KEY, tiled=True, to="invarying", method=STOCHASTIC
            )
            return jnp.vdot(whole, own[0])

        return jax.grad(loss)(part)

    mapped = jax.shard_map(local, mesh=data_mesh(2), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"to='invarying', but .*Give to='varying'"):
        mapped(jnp.ones(4096), jnp.ones((2, 4096)))


# ------------------------------------------------------------------------------- mean of replicas


def test_the_mean_of_stacked_replicas_in_one_jit():
    """A global view: replicas are a leading axis, and each is sharded over the other axis."""
    mesh = jax.make_mesh((2, 4), ("diloco", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    stacked = {"w": of_workers(0, 2, 64 * 128).reshape(2, 64, 128), "b": np.ones((2, 8), "float32")}
    specs = {"w": P(None, "fsdp"), "b": P()}
    shardings = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, P("diloco", *spec)),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )

    @functools.partial(jax.jit, in_shardings=(shardings,))
    def mean(stacked):
        return dq.mean_of_replicas(
            stacked, "diloco", mesh=mesh, key=KEY, method=STOCHASTIC, specs=specs
        )

    found = mean(jax.device_put(stacked, shardings))
    truth = stacked["w"].mean(axis=0, dtype=np.float64)
    assert 1e-7 < vnmse(found["w"], truth) < 1e-4
    np.testing.assert_array_equal(found["b"], np.ones(8))
    assert found["w"].sharding.shard_shape((64, 128)) == (64, 32)


def test_replicas_have_to_be_one_for_each_worker():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"tree\['w'\] has shape \(3, 4\).* 2 workers"):
        dq.mean_of_replicas({"w": jnp.ones((3, 4))}, "data", mesh=mesh, key=KEY)
    with pytest.raises(ValueError, match=r"axis_name='model' .* \('data',\)"):
        dq.mean_of_replicas({"w": jnp.ones((2, 4))}, "model", mesh=mesh, key=KEY)
