"""Steps of equinox, numpyro and keras, wrapped by the lines of the page: `make test-trainers`."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.trainers.recipe import run_lines

os.environ.setdefault("KERAS_BACKEND", "jax")


@pytest.fixture(autouse=True)
def promotion_of_users():
    with jax.numpy_dtype_promotion("standard"):
        yield


def lines(section, method, **given):
    """Return what the lines of a section define, for rows that are split over the devices."""
    names = {"x": jnp.zeros((64, 1)), "y": jnp.zeros((64, 1))} | given
    run_lines("other_trainers.md", "", names)
    run_lines("other_trainers.md", section, names, method.replace("alone", "exact"))
    return names


def check(losses):
    """The exact mean is that of the step as it is, and a compressed run ends near it."""
    np.testing.assert_allclose(losses["exact"], losses["alone"], rtol=1e-5)
    np.testing.assert_allclose(losses["dynamiq"], losses["alone"], rtol=0.03)
    assert losses["dynamiq"] != losses["exact"]


@pytest.mark.filterwarnings("ignore")
def test_equinox():
    eqx = pytest.importorskip("equinox", reason="make test-trainers installs equinox")
    x = jax.random.normal(jax.random.key(0), (64, 32))
    y, optimizer, losses = jnp.sin(x[:, :8]), optax.adam(3e-3), {}

    @eqx.filter_value_and_grad
    def gradient(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def train_step(model, opt_state, x, y):
        loss, grads = gradient(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    for method in ("alone", "exact", "dynamiq"):
        names = lines("equinox", method, train_step=train_step, x=x, y=y)
        step = train_step if method == "alone" else names["train_step"]
        model = eqx.nn.MLP(32, 8, 256, 2, key=jax.random.key(1))
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        for _ in range(15):
            model, state, loss = step(model, state, names["x"], names["y"])
            # XLA:CPU ends the process where devices of several steps in flight wait for each other.
            losses[method] = float(loss)
    check(losses)


@pytest.mark.filterwarnings("ignore")
def test_numpyro():
    numpyro = pytest.importorskip("numpyro", reason="make test-trainers installs numpyro")
    from numpyro import distributions as dist
    from numpyro.infer.autoguide import AutoNormal

    rng, losses = np.random.default_rng(0), {}
    w = rng.normal(size=(64, 32)).astype(np.float32)
    x = rng.normal(size=(512, 64)).astype(np.float32)

    def model(x, y):
        weights = numpyro.sample("w", dist.Normal(0, 1).expand(w.shape).to_event(2))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ weights, 1.0).to_event(1), obs=y)

    loss = numpyro.infer.Trace_ELBO()
    svi = numpyro.infer.SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), loss)
    for method in ("alone", "exact", "dynamiq"):
        first = svi.init(jax.random.PRNGKey(0), x, x @ w)
        names = lines("numpyro", method, svi=svi, state=first, x=x, y=x @ w)
        step = jax.jit(svi.update) if method == "alone" else names["step"]
        state = svi.init(jax.random.PRNGKey(0), x, x @ w)
        for _ in range(40):
            state, loss = step(state, names["x"], names["y"])
        losses[method] = float(loss)
    check(losses)


@pytest.mark.filterwarnings("ignore")
def test_keras():
    """Also with statistics of the batch, which stay those of all rows."""
    keras = pytest.importorskip("keras", reason="make test-trainers installs keras")
    rng, losses = np.random.default_rng(0), {}
    x = rng.normal(size=(256, 32)).astype(np.float32)
    y = x[:, :10].argmax(1)

    def fitted(model_class):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((32,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(256)(inputs))
        hidden = keras.layers.Dropout(0.1)(keras.layers.Activation("gelu")(hidden))
        model = model_class(inputs, keras.layers.Dense(10)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss=loss)
        return model.fit(x, y, batch_size=64, epochs=5, verbose=0).history["loss"][-1]

    mesh = jax.sharding.get_mesh()
    try:
        for method in ("alone", "exact", "dynamiq"):
            names = lines("keras", method)
            losses[method] = fitted(keras.Model if method == "alone" else names["CompressedModel"])
    finally:
        keras.distribution.set_distribution(None)
        jax.set_mesh(mesh)
    check(losses)
