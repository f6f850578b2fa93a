"""Statistics of the batch and their gradients stay exact, whatever is done with their results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._rewriting.sums import CONTINUED, FORWARD
from tests.compress.forms import PARAMS, X, Y, mapped, parts

METHOD = "bf16"
WIDE = 2048


def normalized(params, x):
    """Values without their mean over the whole batch, a large statistic: [rows, WIDE]."""
    wide = jnp.tile(x @ params["w"], (1, WIDE // 32))
    return wide - lax.pmean(jnp.mean(wide**2, 0), "data")[None]


def small_loss(params, x, y):
    """A loss whose only parameter behind the statistic is small: the last sum is small, too."""
    scaled = normalized({"w": PARAMS["w"]}, x * params["b"][None])
    return jnp.mean((scaled.reshape(-1, 32) - jnp.tile(y, (WIDE // 32, 1))) ** 2)


def large_loss(params, x, y):
    hidden = normalized(params, x).reshape(-1, 32) @ params["v"]
    return jnp.mean((hidden - jnp.tile(y, (WIDE // 32, 1))) ** 2)


def summed_by_grad(loss):
    return lambda *a: jax.grad(lambda *a: lax.pmean(loss(*a), "data"))(*a)


def with_mean(loss):
    def step(params, x, y):
        own = lax.pcast(params, "data", to="varying")
        return lax.pmean(jax.grad(loss)(own, x, y), "data")

    return step


def unchecked(loss):
    return lambda *a: lax.pmean(jax.grad(loss)(*a), "data")


def accumulated(loss):
    """The mean of the gradients is outside of the loop with the backward pass."""

    def step(params, x, y):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = lax.scan(add, zeros, parts(x, y))
        return lax.pmean(total, "data")

    return step


FORMS = {
    "summed by grad": (summed_by_grad, True),
    "a mean of the gradients": (with_mean, True),
    "without check_vma": (unchecked, False),
    "accumulated": (accumulated, False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("loss", [small_loss, large_loss])
def test_statistics_and_their_gradients_stay_exact(name, loss, data_mesh):
    make, check_vma = FORMS[name]
    params = {"b": jnp.ones(32), "u": PARAMS["w"], **({} if loss is small_loss else PARAMS)}
    whole = lambda params, x, y: loss(params, x, y) + jnp.mean((x @ params["u"]) ** 2)  # noqa: E731
    step = mapped(make(whole), data_mesh(2), check_vma=check_vma)
    compressed = dq.compress(step, "data", dq.Compression(METHOD, exact_below=64))
    report = compressed.report(params, X, Y)
    wide = [each.why_exact for each in report.sums if each.sum.shape[-1:] == (WIDE,)]
    assert sorted(wide) == sorted([FORWARD, CONTINUED])
    assert len(report.compressed) == (1 if loss is small_loss else 3)
    expected = jax.jit(step)(params, X, Y)
    got = compressed(params, X, Y)
    assert 1e-8 < dq.vnmse(got["u"], expected["u"]) < 1e-4
    np.testing.assert_allclose(got["b"], expected["b"], rtol=1e-4, atol=1e-7)


def test_gradients_with_which_a_backward_pass_goes_on_without_workers_are_compressed(data_mesh):
    """A parameter that is scaled and normalized before the workers use it, in any way."""

    def loss(params, x, y):
        norm = jnp.sqrt(jnp.sum(params["w"] ** 2, 0))
        weights = 0.5 * params["w"] / norm[None] * params["b"][None]
        return lax.pmean(jnp.mean((x @ weights - y) ** 2), "data")

    def step(params, x, y):
        grads = jax.grad(loss)({"w": params["w"], "b": params["b"] + 1}, x, y)
        norm = jnp.sqrt(jnp.sum(grads["w"] ** 2))
        return grads, lax.pmean(lax.pcast(norm, "data", to="varying"), "data")

    whole = mapped(step, data_mesh(2), out=(P(), P()))
    compressed = dq.compress(whole, "data", method=METHOD)
    (each,) = compressed.report(PARAMS, X, Y).compressed
    assert each.sum.shape == (32, 32)
    got, expected = compressed(PARAMS, X, Y), jax.jit(whole)(PARAMS, X, Y)
    assert 1e-8 < dq.vnmse(got[0], expected[0]) < 1e-4


def test_gradients_that_are_summed_twice_are_compressed(data_mesh):
    """As some packages do: `jax.grad` sums them, and `pmean` sums the results."""

    def step(params, x, y):
        def loss(params):
            return jnp.mean((x @ params["w"] - y) ** 2)

        return lax.pmean(lax.pcast(jax.grad(loss)(params), "data", to="varying"), "data")["w"]

    compressed = dq.compress(mapped(step, data_mesh(2)), "data", method=METHOD)
    assert len(compressed.report(PARAMS, X, Y).compressed) == 2
