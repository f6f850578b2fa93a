"""Equinox, numpyro, keras and brax train by the lines of their recipes: `make test-trainers`."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.trainers.recipe import run_lines

os.environ.setdefault("KERAS_BACKEND", "jax")
WORKERS = 4
METHODS = "exact", "dynamiq"


@pytest.fixture(autouse=True)
def promotion_of_users():
    with jax.numpy_dtype_promotion("standard"):
        yield


def names_of(section, method, **given):
    """Return what the lines of a section define."""
    names = dict(given)
    run_lines("other_trainers.md", "", names)
    names["mesh"] = jax.sharding.Mesh(np.array(jax.devices()[:WORKERS]), "data")
    run_lines("other_trainers.md", section, names, method)
    return names


def sent(compiled):
    return sum(sent_by_axes(compiled.as_text(), {"data": WORKERS}).values())


def check(losses, size):
    """The exact mean is that of one device, and a compressed run ends near it."""
    np.testing.assert_allclose(losses["exact"], losses["alone"], rtol=1e-4)
    np.testing.assert_allclose(losses["dynamiq"], losses["alone"], rtol=0.03)
    assert losses["dynamiq"] != losses["exact"]
    assert size["exact"] > 5.5 * size["dynamiq"] > 0
    print(f"losses {losses}, bytes {size}")


@pytest.mark.filterwarnings("ignore")
def test_equinox():
    eqx = pytest.importorskip("equinox", reason="make test-trainers installs equinox")
    x = jax.random.normal(jax.random.key(0), (64, 32))
    y, optimizer = jnp.sin(x[:, :8]), optax.adam(3e-3)

    def loss_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def gelu(x):
        return jax.nn.gelu(x, approximate=False)

    losses, size = {}, {}
    for method in ("alone", *METHODS):
        model = eqx.nn.MLP(32, 8, 256, 2, activation=gelu, key=jax.random.key(1))
        given = {"model": model, "loss_fn": loss_fn, "x": x, "y": y, "optimizer": optimizer}
        lines = names_of("equinox", method.replace("alone", "exact"), **given)
        if method == "alone":
            lines["mean_loss"] = loss_fn
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        compiled = lines["train_step"].lower(model, state, x, y).compile()
        size[method] = sent(compiled.compiled)
        for _ in range(40):
            model, state, loss = lines["train_step"](model, state, x, y)
        losses[method] = float(loss)
    check(losses, size)


@pytest.mark.filterwarnings("ignore")
def test_numpyro():
    numpyro = pytest.importorskip("numpyro", reason="make test-trainers installs numpyro")
    from numpyro import distributions as dist
    from numpyro.infer.autoguide import AutoNormal

    rows, features, outputs = 512, 64, 32
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    noise = rng.normal(size=(rows, outputs))
    y = (x @ rng.normal(size=(features, outputs)) + noise).astype(np.float32)

    def model(x, y, scaled=True):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([features, outputs]).to_event(2))
        with numpyro.plate("rows", rows if scaled else x.shape[0], subsample_size=x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    losses, size = {}, {}
    given = {"model": model, "key": jax.random.PRNGKey(0), "x": x, "y": y}
    for method in ("alone", *METHODS):
        guide = AutoNormal(model)
        lines = names_of("numpyro", method.replace("alone", "exact"), guide=guide, **given)
        svi = lines["svi"]
        if method == "alone":
            svi.loss = numpyro.infer.Trace_ELBO()
        state, step = svi.init(jax.random.PRNGKey(0), x, y), jax.jit(svi.update)
        size[method] = sent(step.lower(state, x, y).compile())
        for _ in range(200):
            state, loss = step(state, x, y)
        losses[method] = float(loss)
    check(losses, size)
    unscaled = functools.partial(model, scaled=False)
    with pytest.raises(ValueError, match="Likely cause: a sum over rows"):
        names_of("numpyro", "dynamiq", guide=AutoNormal(unscaled), **(given | {"model": unscaled}))


@pytest.mark.filterwarnings("ignore")
def test_keras():
    keras = pytest.importorskip("keras", reason="make test-trainers installs keras")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 32)).astype(np.float32)
    y = x[:, :10].argmax(1)

    def built(model_class, normalizes):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((32,))
        hidden = keras.layers.Dense(256)(inputs)
        hidden = keras.layers.BatchNormalization()(hidden) if normalizes else hidden
        hidden = keras.layers.Activation("gelu")(hidden)
        model = model_class(inputs, keras.layers.Dense(10)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
        return model

    def fitted(model_class, normalizes):
        model = built(model_class, normalizes)
        history = model.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0).history
        return {name: values[-1] for name, values in history.items()}

    results = {("alone", normalizes): fitted(keras.Model, normalizes) for normalizes in (0, 1)}
    for method in METHODS:
        lines = names_of("keras", method)
        model_class = lines["CompressedModel"]
        run_check = functools.partial(run_lines, "other_trainers.md", "First check in keras")
        run_check(lines | {"model": built(model_class, 0), "x": x[:64], "y": y[:64]})
        with pytest.raises(ValueError, match="Likely cause: statistics of the batch"):
            run_check(lines | {"model": built(model_class, 1), "x": x[:64], "y": y[:64]})
        for normalizes in (0, 1):
            results[method, normalizes] = fitted(model_class, normalizes)
    for name in ("loss", "accuracy"):
        alone = results["alone", 0][name]
        np.testing.assert_allclose(results["exact", 0][name], alone, rtol=1e-3)
        np.testing.assert_allclose(results["dynamiq", 0][name], alone, rtol=0.05)
    # Statistics of batches are those of a worker: the page says so.
    assert results["exact", 1]["loss"] > 1.02 * results["alone", 1]["loss"]
    print(results)


@pytest.mark.filterwarnings("ignore")
def test_brax(monkeypatch):
    pytest.importorskip("brax", reason="make test-trainers installs brax")

    def put_replicated(tree, devices):
        mesh = jax.sharding.Mesh(np.array(devices), "i")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), tree)
        return jax.device_put(stacked, sharding)

    monkeypatch.setattr(jax, "device_put_replicated", put_replicated, raising=False)
    from brax import envs
    from brax.training import gradients
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as ppo

    size, pmap = {}, jax.pmap

    def recorded(function, **options):
        mapped = pmap(function, **options)

        def call(*args):
            if getattr(function, "__name__", "") == "training_epoch":
                size[method] = sent(mapped.lower(*args).compile())
            return mapped(*args)

        return call

    monkeypatch.setattr(jax, "pmap", recorded)
    network = functools.partial(networks.make_ppo_networks, value_hidden_layer_sizes=(128,) * 3)
    losses, seen = {}, []
    for method in ("alone", *METHODS):  # alone: as brax is
        if method != "alone":
            monkeypatch.setattr(gradients, "loss_and_pgrad", names_of("brax", method)["compressed"])
        ppo.train(
            environment=envs.get_environment("fast"),
            num_timesteps=20_000,
            num_envs=64,
            episode_length=128,
            unroll_length=5,
            batch_size=64,
            num_minibatches=4,
            num_updates_per_batch=2,
            learning_rate=3e-4,
            run_evals=False,
            max_devices_per_host=WORKERS,
            network_factory=network,
            progress_fn=lambda _, metrics: seen.append(float(metrics["training/total_loss"])),
        )
        losses[method] = seen[-1]
    check(losses, size)
