"""Functions and strings among the leaves of parameters."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq

KEY = jax.random.key(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A module that is a pytree, can be called, and holds a function."""

    kernel: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x):
        return self.activation(x @ self.kernel)


def make(kind: str):
    kernel = jax.random.normal(KEY, (32, 48)) / 8
    layer = Layer(kernel, jnp.tanh)
    return layer if kind == "module" else {"layer": layer, "name": "first"}


def loss_fn(params, x):
    layer = params if isinstance(params, Layer) else params["layer"]
    assert isinstance(params, Layer) or params["name"] == "first"
    return jnp.mean(layer(x) ** 2)


@pytest.mark.parametrize("kind", ("module", "dict"))
def test_what_is_no_array_is_static_and_has_no_gradient(data_mesh, kind):
    x, params = jax.random.normal(KEY, (16, 32)), make(kind)
    kernel = make("module").kernel
    expected, gradient = jax.value_and_grad(lambda w: loss_fn(Layer(w, jnp.tanh), x))(kernel)
    grad_fn = dq.value_and_grad(loss_fn, mesh=data_mesh(4), axis_name="data", method="exact")
    loss, grads = grad_fn(params, x, key=KEY)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    (found,) = jax.tree.leaves(grads)
    np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-7)
    if kind == "dict":
        assert grads["name"] is None
    assert (grads if kind == "module" else grads["layer"]).activation is None


def test_functions_that_differ_have_programs_of_their_own(data_mesh):
    x, layer = jax.random.normal(KEY, (16, 32)), make("module")
    mean_loss = dq.data_parallel(loss_fn, mesh=data_mesh(4), axis_name="data", method="exact")
    for activation in (jnp.tanh, jnp.sin, jnp.tanh):
        layer = dataclasses.replace(layer, activation=activation)
        np.testing.assert_allclose(mean_loss(layer, x), loss_fn(layer, x), rtol=1e-6)
