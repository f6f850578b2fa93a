"""Steps of flax.nnx and equinox, whose arguments are objects and modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

WORKERS, STEPS = 4, 5
X = np.random.default_rng(0).normal(size=(8 * WORKERS, 32)).astype(np.float32)
Y = np.tanh(X[:, ::-1])
OPTIONS = dq.Compression("bf16", exact_below=1024)


@pytest.fixture(autouse=True)
def promotion_of_their_authors():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def mesh(data_mesh):
    return data_mesh(WORKERS)


@pytest.fixture
def batch(mesh):
    return jax.device_put((X, Y), NamedSharding(mesh, P("data")))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_step(model, optimizer, metrics, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, gradient = nnx.value_and_grad(loss_fn)(model)
    metrics.update(loss=loss)
    optimizer.update(model, gradient)
    return loss


def nnx_objects(mesh):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    for each in (model, optimizer, metrics):
        nnx.update(each, jax.device_put(nnx.state(each), NamedSharding(mesh, P())))
    return model, optimizer, metrics


def trained(step, mesh, batch):
    """Return all that a run leaves behind."""
    objects = nnx_objects(mesh)
    losses = [float(step(*objects, *batch)) for _ in range(STEPS)]
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(nnx.state(objects))
    ]
    return losses, [np.asarray(leaf) for leaf in leaves]


@pytest.mark.parametrize("is_jitted", [True, False])
def test_objects_of_nnx_are_updated_as_nnx_jit_does(is_jitted, mesh, batch):
    """Model, optimizer, metrics, statistics, and counters of noise."""
    expected, states = trained(nnx.jit(nnx_step), mesh, batch)
    fun = nnx.jit(nnx_step) if is_jitted else nnx_step
    losses, exactly = trained(dq.compress(fun, "data", method="exact"), mesh, batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for got, wanted in zip(exactly, states, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)
    step = dq.compress(fun, "data", method=OPTIONS)
    losses, _ = trained(step, mesh, batch)
    assert losses != expected
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    report = step.report(*nnx_objects(mesh), *batch)
    assert {each.sum.shape for each in report.compressed} == {(32, 64), (64, 32)}


def test_a_new_attribute_of_an_object_is_an_error(mesh, batch):
    def step(model, x, y):
        gradient = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), gradient))
        model.gradient = nnx.Param(gradient["second"]["kernel"][...])

    model, _, _ = nnx_objects(mesh)
    with pytest.raises(ValueError, match=r"changes the structure of a flax\.nnx object"):
        dq.compress(step, "data", method=OPTIONS)(model, *batch)


@pytest.mark.parametrize("is_jitted", [True, False])
def test_modules_of_equinox_keep_what_is_no_array(is_jitted, mesh, batch):
    optimizer = optax.adam(1e-2)

    def step(model, state, x, y):
        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, gradient = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    def losses(step):
        model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        arrays, rest = eqx.partition((model, state), eqx.is_array)
        model, state = eqx.combine(jax.device_put(arrays, NamedSharding(mesh, P())), rest)
        of_steps = []
        for _ in range(STEPS):
            model, state, loss = step(model, state, *batch)
            of_steps.append(float(loss))
        assert model.activation is eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0)).activation
        return of_steps

    fun = eqx.filter_jit(step) if is_jitted else step
    expected = losses(eqx.filter_jit(step))
    np.testing.assert_allclose(
        losses(dq.compress(fun, "data", method="exact")), expected, rtol=1e-5
    )
    compressed = losses(dq.compress(fun, "data", method=OPTIONS))
    assert compressed != expected
    np.testing.assert_allclose(compressed, expected, rtol=0.05)
