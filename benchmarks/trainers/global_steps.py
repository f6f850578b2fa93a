"""Short trainings of packages whose step is a jitted program with shardings.

Each function trains with one package, as the package is. The only change is `wrap(step, ...)` where
the step is made.
"""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.trainers.training import PackageTraining, Wrap

STEPS = 20


def _workers() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def _split(mesh: Mesh, rows: Any) -> Any:
    """Split the rows of a batch over the workers."""
    return jax.device_put(rows, NamedSharding(mesh, P("data")))


def keras(wrap: Wrap) -> list[float]:
    """Fit a model with batch norm and dropout, by the data parallelism of keras."""
    import keras
    from keras.src.backend.jax import trainer

    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    mesh = distribution.device_mesh.backend_mesh
    jit = trainer.jit

    def jitted(function: Any, **options: Any) -> Any:
        step = jit(function, **options)
        return wrap(step, "batch", mesh=mesh, parameters=lambda state, batch: state[0])

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def make_train_function(self, force: bool = False) -> None:
            with mock.patch.object(trainer, "jit", jitted):
                super().make_train_function(force)

    class Losses(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))

    keras.utils.set_random_seed(0)
    rows = np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32)
    inputs = keras.Input((32,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(256)(inputs))
    hidden = keras.layers.Dropout(0.1)(keras.layers.Activation("gelu")(hidden))
    model = Model(inputs, keras.layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    losses: list[float] = []
    model.fit(
        *(rows, rows[:, :10].argmax(1)),
        batch_size=64,
        epochs=STEPS // 4,
        shuffle=False,
        verbose=0,
        callbacks=[Losses()],
    )
    return losses


def numpyro(wrap: Wrap) -> list[float]:
    """Fit a linear regression by stochastic variational inference of numpyro."""
    import numpyro
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    rng, mesh = np.random.default_rng(0), _workers()
    weights = rng.normal(size=(64, 32)).astype(np.float32)
    x = rng.normal(size=(512, 64)).astype(np.float32)
    batch = _split(mesh, (x, x @ weights))

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand(weights.shape).to_event(2))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())
    state = svi.init(jax.random.PRNGKey(0), *batch)
    step = wrap(
        jax.jit(svi.update), "data", mesh=mesh, parameters=lambda state, *_: svi.get_params(state)
    )
    losses = []
    for _ in range(STEPS):
        state, loss = step(state, *batch)
        losses.append(float(loss))
    return losses


def penzai(wrap: Wrap) -> list[float]:
    """Train a Llama of two layers by `StatefulTrainer` of penzai."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama
    from penzai.toolshed.basic_training import StatefulTrainer

    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=128,
        projection_dim=32,
        mlp_hidden_dim=256,
        num_decoder_blocks=2,
        vocab_size=512,
        mlp_variant="swiglu",
        tie_embedder_and_logits=True,
    )
    mesh = _workers()
    tokens = _split(mesh, jax.random.randint(jax.random.key(2), (16, 33), 0, 512))

    def loss_fn(model: Any, state: Any, rng: Any, tokens: Any) -> tuple[Any, Any, Any]:
        named = pz.nx.wrap(tokens, "batch", "seq")
        logits = model(named[{"seq": pz.slice[:-1]}]).untag("vocabulary")
        entropy = pz.nx.nmap(optax.softmax_cross_entropy_with_integer_labels)
        losses = entropy(logits, named[{"seq": pz.slice[1:]}])
        loss = losses.untag("batch", "seq").mean().unwrap()
        return loss, state, loss

    trainer = StatefulTrainer.build(
        root_rng=jax.random.key(1),
        model=llama.build_llamalike_transformer(config, init_base_rng=jax.random.key(0)),
        optimizer_def=optax.adam(1e-3),
        loss_fn=loss_fn,
    )
    step = wrap(
        trainer.step_fn,
        "data",
        mesh=mesh,
        parameters=lambda trainable_params, **_: trainable_params,
    )
    trainer = dataclasses.replace(trainer, step_fn=step)
    return [float(trainer.step(tokens=tokens)) for _ in range(STEPS)]


def blaxbird(wrap: Wrap) -> list[float]:
    """Train a flax.nnx network with batch norm and dropout by blaxbird."""
    from blaxbird import train_fn
    from flax import nnx

    class Network(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any):
            self.convolutions = nnx.List(
                [nnx.Conv(1, 32, (3, 3), rngs=rngs), nnx.Conv(32, 64, (3, 3), rngs=rngs)]
            )
            self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
            self.head = nnx.Linear(64 * 4 * 4, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            first, second = self.convolutions
            x = nnx.avg_pool(nnx.relu(self.norm(first(x))), (2, 2), (2, 2))
            x = nnx.avg_pool(nnx.relu(second(x)), (2, 2), (2, 2))
            return self.head(self.dropout(x.reshape(x.shape[0], -1)))

    def loss_fn(model: Any, rng_key: Any, batch: Any) -> Any:
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    mesh, losses = _workers(), []
    step = wrap(
        nnx.jit(nnx.value_and_grad(loss_fn)),
        "data",
        mesh=mesh,
        parameters=lambda model, *_: nnx.state(model, nnx.Param),
    )

    def recorded(*args: Any) -> Any:
        loss, grads = step(*args)
        losses.append(float(loss))
        return loss, grads

    images = np.random.default_rng(0).normal(size=(64, 16, 16, 1)).astype(np.float32)
    data = itertools.repeat({"image": images, "label": images[:, :10, 0, 0].argmax(1)})
    train = train_fn(
        fns=(recorded, nnx.jit(loss_fn)),
        mesh=mesh,
        data_partition_spec=P("data"),
        n_steps=STEPS,
        eval_every_n_steps=STEPS,
        n_eval_batches=1,
    )
    model = Network(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    train(jax.random.key(0), optimizer, data, data)
    return losses


def flowjax(wrap: Wrap) -> list[float]:
    """Fit a normalizing flow by flowjax, whose step is one of equinox."""
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train import fit_to_data, loops

    mesh, losses = _workers(), []
    step = wrap(loops.step, "data", mesh=mesh, parameters=lambda params, *_, **__: params)
    get_batches = loops.get_batches

    def recorded(*args: Any, **kwargs: Any) -> Any:
        results = step(*args, **kwargs)
        losses.append(float(results[2]))
        return results

    def split_batches(arrays: Any, size: int) -> list[list[Any]]:
        return [[_split(mesh, rows) for rows in each] for each in get_batches(arrays, size)]

    rng = np.random.default_rng(0)
    x = (rng.normal(size=(640, 8)) @ rng.normal(size=(8, 8))).astype(np.float32)
    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(8)), flow_layers=2, nn_width=64
    )
    with (
        mock.patch.object(loops, "step", recorded),
        mock.patch.object(loops, "get_batches", split_batches),
    ):
        fit_to_data(
            *(jax.random.key(1), flow, x),
            max_epochs=STEPS // 4,
            batch_size=128,
            val_prop=0.2,
            show_progress=False,
        )
    return losses


TRAININGS = {
    "keras": PackageTraining(
        "keras, batch norm",
        "keras",
        "keras",
        "trainers",
        "`make_train_function` of a subclass",
        keras,
        variables={"KERAS_BACKEND": "jax"},
    ),
    "numpyro": PackageTraining(
        "numpyro, SVI", "numpyro", "numpyro", "trainers", "`jax.jit(svi.update)`", numpyro
    ),
    "penzai": PackageTraining(
        "penzai, Llama", "penzai", "penzai", "trainers", "`trainer.step_fn`", penzai
    ),
    "blaxbird": PackageTraining(
        "blaxbird, flax.nnx", "blaxbird", "blaxbird", "trainers", "`fns` of `train_fn`", blaxbird
    ),
    "flowjax": PackageTraining(
        "flowjax, equinox", "flowjax", "flowjax", "trainers", "`flowjax.train.loops.step`", flowjax
    ),
}
