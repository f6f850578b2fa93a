"""Gradients of equinox modules, which hold functions and numbers as leaves, as equinox has them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dynamiq_jax as dq
from tests.support.others import package

eqx = package("equinox")
KEY = jax.random.key(0)


class Model(eqx.Module):
    layers: eqx.nn.MLP
    dropout: eqx.nn.Dropout  # its rate and its switch are Python numbers
    activation: object
    table: jax.Array

    def __call__(self, x):
        return self.activation(self.dropout(self.layers(x), inference=True)) + self.table[0]


def model():
    layers = eqx.nn.MLP(16, 8, 32, 2, key=KEY)
    return Model(layers, eqx.nn.Dropout(0.5), lambda x: 2 * x, jnp.arange(3.0))


def loss_fn(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize("jit", (False, True), ids=("eager", "jit"))
def test_a_wrapped_loss_is_differentiated_by_equinox(data_mesh, jit):
    x = jax.random.normal(KEY, (16, 16))
    mean_loss = dq.data_parallel(loss_fn, mesh=data_mesh(4), axis_name="data", method="exact")
    grad_fn = eqx.filter_value_and_grad(mean_loss)
    found = (eqx.filter_jit(grad_fn) if jit else grad_fn)(model(), x)
    expected = eqx.filter_value_and_grad(loss_fn)(model(), x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, expected
    )


def test_gradients_are_those_of_equinox_and_update_the_module(data_mesh):
    x = jax.random.normal(KEY, (16, 16))
    setting = {"mesh": data_mesh(4), "axis_name": "data"}
    loss, grads = dq.value_and_grad(loss_fn, **setting)(model(), x, key=KEY)
    _, exact = dq.value_and_grad(loss_fn, **setting, method="exact")(model(), x, key=KEY)
    expected = eqx.filter_grad(loss_fn)(model(), x)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), exact, expected
    )
    errors = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), grads, exact))
    assert 0 < max(errors) < 0.1 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(exact))
    optimizer = optax.sgd(0.1)
    state = optimizer.init(eqx.filter(model(), eqx.is_inexact_array))
    updates, _ = optimizer.update(grads, state)
    better = eqx.apply_updates(model(), updates)
    assert loss_fn(better, x) < loss
    assert better.dropout.p == 0.5 and better.layers.activation is model().layers.activation
