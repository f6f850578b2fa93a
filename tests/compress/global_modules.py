"""Steps of one global program whose states are objects and modules, jitted by their packages."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.compress.global_forms import Step, X, Y, form


class Model(nnx.Module):
    """Statistics of a batch, and noise that a stream counts."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


@form((32, 64), (64, 16))
def nnx_objects(place):
    """A model with dropout, its optimizer and a metrics object, which `nnx.jit` updates."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    objects = model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    for each in objects:
        nnx.update(each, place.put(nnx.state(each)))

    def step(objects, x, y):
        model, optimizer, metrics = objects
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        metrics.update(loss=loss)
        optimizer.update(model, gradient)
        return objects, loss

    return Step(step, objects, place.put((X, Y), "data"), nnx.jit)


@form((64, 32), (64, 64), (16, 64))
def equinox_modules(place):
    """A model with functions among its leaves, under `eqx.filter_jit`."""
    optimizer = optax.adam(1e-2)
    model = eqx.nn.MLP(32, 16, 64, 2, key=jax.random.key(0))
    arrays, others = eqx.partition(model, eqx.is_array)
    state = eqx.combine(place.put(arrays), others), place.put(optimizer.init(arrays))

    def step(state, x, y):
        model, of_optimizer = state

        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, gradient = eqx.filter_value_and_grad(loss_fn)(model)
        updates, of_optimizer = optimizer.update(gradient, of_optimizer)
        return (eqx.apply_updates(model, updates), of_optimizer), loss

    return Step(step, state, place.put((X, Y), "data"), eqx.filter_jit)
