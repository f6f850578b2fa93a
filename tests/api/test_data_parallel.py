"""dq.data_parallel: the loss of the whole batch, whose gradients are compressed means."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.gradients import vnmse
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC

NUM_WORKERS, BATCH, IN, OUT = 4, 32, 64, 96


def params():
    return {"w": np.random.default_rng(0).normal(size=(IN, OUT)).astype(np.float32) / 8}


def batch(seed: int = 1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, IN)).astype(np.float32)
    return x, rng.normal(size=(BATCH, OUT)).astype(np.float32)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)


def wrapped(data_mesh, loss=loss_fn, **arguments):
    arguments = {"method": STOCHASTIC, "axis_name": "data"} | arguments
    return dq.data_parallel(loss, mesh=data_mesh(NUM_WORKERS), **arguments)


@pytest.mark.parametrize("jit", (True, False), ids=("jit", "eager"))
def test_the_loss_is_that_of_the_batch_and_gradients_are_close(data_mesh, jit):
    grad_fn = jax.value_and_grad(wrapped(data_mesh))
    loss, grads = (jax.jit(grad_fn) if jit else grad_fn)(params(), *batch())
    expected, expected_grads = jax.value_and_grad(loss_fn)(params(), *batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert 1e-7 < vnmse(grads["w"], expected_grads["w"]) < 1e-3


def test_noise_follows_parameters_and_batch(data_mesh):
    """The same gradient is rounded in another way where any bit of the batch differs, or a sample
    of the parameters.
    """
    gradient = batch()[0].T @ batch()[1]
    grad_fn = jax.jit(
        jax.grad(wrapped(data_mesh, lambda params, x, y: jnp.vdot(params["w"], gradient)))
    )

    def change(array, index):
        other = array.copy()
        other[index] = np.nextafter(other[index], np.float32(9))
        return other

    (x, y), weights = batch(), params()["w"]
    first = grad_fn({"w": weights}, x, y)["w"]
    np.testing.assert_array_equal(first, grad_fn({"w": weights}, x, y)["w"])
    for other in (
        grad_fn({"w": weights}, change(x, (0, 0)), y),
        grad_fn({"w": weights}, x, change(y, (-1, -1))),
        grad_fn({"w": change(weights, ...)}, x, y),
    ):
        assert np.mean(np.asarray(first) != np.asarray(other["w"])) > 0.3


def test_it_has_the_name_and_the_signature_of_the_loss(data_mesh):
    """Trainers look arguments up by name."""
    found = wrapped(data_mesh)
    assert found.__name__ == loss_fn.__name__
    assert inspect.signature(found) == inspect.signature(loss_fn)


def test_the_loss_alone_sends_no_gradient(data_mesh):
    hlo = jax.jit(wrapped(data_mesh)).lower(params(), *batch()).compile().as_text()
    assert {sent.kind for sent in collectives(hlo)} == {"all-reduce"}


def test_frozen_parameters_are_not_sent(data_mesh):
    """As with low-rank adapters: a frozen matrix and a small one that learns."""

    def loss(adapter, frozen, x, y):
        return loss_fn({"w": frozen["w"] + adapter["a"] @ adapter["b"]}, x, y)

    mean_loss = wrapped(data_mesh, loss, argnums=(0, 1))
    adapter = {"a": np.ones((IN, 16), np.float32), "b": np.ones((16, OUT), np.float32)}
    grad_fn = jax.jit(jax.grad(mean_loss))
    hlo = grad_fn.lower(adapter, params(), *batch()).compile().as_text()
    both = jax.jit(jax.grad(mean_loss, argnums=(0, 1))).lower(adapter, params(), *batch())
    sent = [
        sum(each.result_bytes for each in collectives(text) if each.kind == "collective-permute")
        for text in (hlo, both.compile().as_text())
    ]
    assert 0 < sent[0] < 0.6 * sent[1]


def test_arguments_by_name_are_those_by_position(data_mesh):
    def loss(params, x, *, y, scale, kind="mean"):
        assert kind == "mean"
        return loss_fn(params, x, y) * scale[0]

    mean_loss = wrapped(data_mesh, loss, in_specs={"scale": P()}, static_argnames="kind")
    x, y = batch()
    value = mean_loss(params(), x=x, y=y, scale=np.full(3, 2, np.float32), kind="mean")
    np.testing.assert_allclose(value, 2 * loss_fn(params(), x, y), rtol=1e-6)


@pytest.mark.parametrize("by_name", (False, True), ids=("positions", "names"))
def test_workers_are_weighted_by_their_targets(data_mesh, by_name):
    x, y = batch()
    mask = np.arange(BATCH) < 11

    def loss(params, x, y, scale=1.0, mask=None):  # no scale is given: arguments have a gap
        errors = ((jnp.tanh(x @ params["w"]) - y) ** 2).mean(axis=1)
        loss = jnp.sum(errors * mask) / jnp.maximum(1, mask.sum())
        return loss, {"errors": loss * 2, "rows": jnp.int32(8), "zero": 0.0}

    arguments = {"num_targets": lambda params, x, y, scale, mask: mask.sum(), "has_aux": True}
    mean_loss = wrapped(data_mesh, loss, aux="mean", **arguments)
    kwargs = {"x": x, "y": y, "mask": mask.astype(np.float32)}
    arguments = ((), kwargs) if by_name else ((x, y, 1.0, kwargs["mask"]), {})
    value, aux = mean_loss(params(), *arguments[0], **arguments[1])
    expected, _ = loss(params(), **kwargs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(aux["errors"], 2 * expected, rtol=1e-6)
    assert float(aux["rows"]) == 8 and float(aux["zero"]) == 0


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, OUT, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.first(x))


def test_an_nnx_trainer_takes_it_as_its_loss(data_mesh):
    """`nnx.value_and_grad` and `nnx.Optimizer` of a module with dropout, inside `nnx.jit`."""
    model = Noisy(nnx.Rngs(0))
    mean_loss = wrapped(data_mesh, lambda model, x, y: jnp.mean((model(x) - y) ** 2))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(mean_loss)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, *batch())) for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0]
    assert int(model.dropout.rngs.count[...]) == 6


def test_nnx_maps_are_told_what_to_do(data_mesh):
    """`nnx.value_and_grad` inside `nnx.shard_map` returns sums; after a split it does not."""
    model, (x, y) = nnx.Linear(IN, OUT, rngs=nnx.Rngs(0)), batch()

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def summed(model, x, y):
        grads = nnx.grad(loss)(model, x, y)
        return dq.pmean(grads, "data", key=jax.random.key(0))

    def own(model, x, y):
        graph, params = nnx.split(model)
        varying = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda params: loss(nnx.merge(graph, params), x, y))(varying)
        return dq.pmean(grads, "data", key=jax.random.key(0), method=STOCHASTIC)

    def over_workers(function):
        whole = nnx.StateSharding({...: P()})
        return nnx.shard_map(
            function,
            mesh=data_mesh(NUM_WORKERS),
            in_specs=(whole, P("data"), P("data")),
            out_specs=P(),
        )

    with pytest.raises(ValueError, match=r"already summed.*dq\.value_and_grad takes it as it is"):
        over_workers(summed)(model, x, y)
    grads = nnx.jit(over_workers(own))(model, x, y)["kernel"].get_value()
    expected = nnx.grad(loss)(model, x, y)["kernel"].get_value()
    assert 1e-7 < vnmse(grads, expected) < 1e-3


class Stacked(nnx.Module):
    """Layers that share one variable, keys for each, and metadata that cannot be hashed."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(params()["w"], tags=["a", "list"])
        self.rngs = rngs.split(2)

    def __call__(self, x):
        keys = self.rngs.default.key.get_value()
        assert keys.shape == (2,)
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, shape=(OUT,)))(keys)
        return x @ self.w[...] * (kept[0] & ~kept[1]).astype(x.dtype)[None, :]


@pytest.mark.parametrize("form", ("data_parallel", "value_and_grad"))
def test_modules_may_have_stacked_keys_and_metadata_of_any_kind(data_mesh, form):
    model, (x, y) = Stacked(nnx.Rngs(0)), batch()

    def loss(model, x, y):
        return jnp.mean(model(x) ** 2)

    arguments = {"mesh": data_mesh(NUM_WORKERS), "axis_name": "data", "method": dq.Exact()}
    if form == "data_parallel":
        value, grads = nnx.value_and_grad(dq.data_parallel(loss, **arguments))(model, x, y)
    else:
        value, grads = dq.value_and_grad(loss, **arguments)(model, x, y, key=jax.random.key(0))
    columns = np.any(np.asarray(grads.w.get_value()) != 0, axis=0)
    assert 0.5 < columns.mean() < 1  # one worker keeps a quarter, four of them two thirds
    assert value > 0


class Logical(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_logical_partitioning(
            linen.initializers.lecun_normal(), ("embed", "hidden")
        )
        return linen.Dense(OUT, kernel_init=init, use_bias=False)(x)


def test_linen_parameters_by_logical_rules():
    """Specs are those that flax makes of logical names."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    model, rules = Logical(), (("embed", "fsdp"), ("hidden", None))
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, IN)))
    shardings = linen.logical_to_mesh_sharding(linen.get_partition_spec(boxed), mesh, rules)
    init = jax.jit(
        lambda key: linen.unbox(model.init(key, jnp.zeros((1, IN)))), out_shardings=shardings
    )
    weights = init(jax.random.key(0))

    def loss(params, x, y):
        return jnp.mean((model.apply(params, x) - y) ** 2)

    mean_loss = dq.data_parallel(
        loss, mesh=mesh, axis_name="data", specs=shardings, method=STOCHASTIC
    )
    grads = jax.jit(jax.grad(mean_loss))(weights, *batch())
    kernel = grads["params"]["Dense_0"]["kernel"]
    expected = jax.grad(loss)(weights, *batch())["params"]["Dense_0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (IN // 4, OUT)
    assert 1e-7 < vnmse(kernel, expected) < 1e-3


def test_types_place_gradients_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    mean_loss = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data", method=STOCHASTIC)
    with jax.set_mesh(mesh):
        weights = jax.device_put(params(), NamedSharding(mesh, P("fsdp")))
        x, y = jax.device_put(batch(), NamedSharding(mesh, P("data")))
        grads = jax.jit(jax.grad(mean_loss))(weights, x, y)["w"]
    expected = jax.grad(loss_fn)(params(), *batch())["w"]
    assert grads.sharding.shard_shape(grads.shape) == (IN // 4, OUT)
    assert 1e-7 < vnmse(grads, expected) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"method": "ef+topk_chunked:2"}, "carries state .* which dq.data_parallel cannot keep"),
        ({"axis_name": "rows"}, "axis_name='rows' is not an axis of the mesh"),
    ),
)
def test_what_is_refused(data_mesh, arguments, message):
    with pytest.raises(ValueError, match=message):
        wrapped(data_mesh, **arguments)


def test_a_batch_that_does_not_divide_is_refused(data_mesh):
    x, y = batch()
    with pytest.raises(ValueError, match="leading axis does not split over the 4 workers"):
        wrapped(data_mesh)(params(), x[:30], y[:30])


def test_missing_specs_are_asked_for():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    mean_loss = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data")
    with pytest.raises(ValueError, match="specs=None, but the compiler manages axis 'fsdp'"):
        jax.jit(functools.partial(jax.grad(mean_loss)))(params(), *batch())
