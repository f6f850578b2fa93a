"""Steps without a sum to compress: an error, or as they were where that is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, loss_fn, mapped

HALVES = [each.reshape(2, -1, 32) for each in (X, Y)]


def evaluation(params, x, y):
    """A map of a program that trains: its only sum is small."""
    return lax.pmean(loss_fn(params, x, y), "data")


def test_an_error_names_the_sums_and_the_option(data_mesh):
    step = dq.compress(mapped(evaluation, data_mesh(2)), "data")
    with pytest.raises(ValueError, match=r"(?s)psum of float32\[\].*missing_ok=True"):
        step(PARAMS, X, Y)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_step_that_may_lack_sums_stays_as_it_is(jitted, data_mesh):
    fun = mapped(evaluation, data_mesh(2))
    fun = jax.jit(fun) if jitted else fun
    step = dq.compress(fun, "data", missing_ok=True)
    np.testing.assert_array_equal(step(PARAMS, X, Y), jax.jit(fun)(PARAMS, X, Y))
    report = step.report(PARAMS, X, Y)
    assert not report.compressed
    assert report.num_groups == 0
    (each,) = report.sums
    assert each.why_exact == "fewer elements than exact_below"
    titles, _, sentence = str(report).splitlines()
    assert titles.startswith("sum ") and sentence.startswith("Nothing is compressed: each of")


def test_the_report_of_a_step_without_sums_is_a_sentence(data_mesh):
    doubled = lambda params, x, y: 2 * x  # noqa: E731
    for fun in (doubled, mapped(doubled, data_mesh(2), out=P("data"))):
        report = dq.compress(fun, "data", missing_ok=True).report(PARAMS, X, Y)
        assert str(report) == "Nothing is compressed: the step has no sum over a named axis."


def test_the_report_of_compressed_sums_is_a_table_alone(data_mesh):
    step = mapped(lambda *a: lax.pmean(jax.grad(loss_fn)(*a), "data"), data_mesh(2))
    text = str(dq.compress(step, "data").report(PARAMS, X, Y))
    assert "compressed, group 0" in text and "Nothing" not in text


def test_all_maps_of_a_program_can_be_wrapped(monkeypatch):
    """A function in place of `jax.pmap`; the key is one of the step with sums alone."""
    pmap, keys, reports = jax.pmap, [], []

    def key_of(params, x, y):
        keys.append(x.shape)
        return jax.random.key(0)

    def wrapped(fun, axis_name, **options):
        mapped = pmap(fun, axis_name, devices=jax.devices()[:2], **options)
        step = dq.compress(mapped, axis_name, key=key_of, method="bf16", missing_ok=True)
        return lambda *args: (reports.append(step.report(*args)), step(*args))[1]

    monkeypatch.setattr(jax, "pmap", wrapped)
    rows = jax.pmap(lambda x: 2 * x, "data")
    train = jax.pmap(
        lambda *a: lax.pmean(jax.grad(loss_fn)(*a), "data"), "data", in_axes=(None, 0, 0)
    )
    test = jax.pmap(evaluation, "data", in_axes=(None, 0, 0))
    np.testing.assert_array_equal(rows(HALVES[0]), 2 * HALVES[0])
    grads = train(PARAMS, *HALVES)
    losses = test(PARAMS, *HALVES)
    assert [len(each.compressed) for each in reports] == [0, 2, 0]
    assert keys == [HALVES[0].shape]
    assert jnp.isfinite(losses).all()
    assert losses[0] == losses[1]
    expected = jax.grad(loss_fn)(PARAMS, X, Y)
    first = jax.tree.map(lambda leaf: leaf[0], grads)
    assert 1e-8 < dq.vnmse(first, expected) < 1e-4


def test_other_errors_of_such_a_step_remain(data_mesh):
    """A method with a state, and axes that the compiler manages inside of the map."""
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    local = lambda *a: lax.pmean(jax.grad(loss_fn)(*a), "data")  # noqa: E731
    specs = {"specs": (P(), P("data"), P("data")), "axis_names": {"data"}, "check_vma": False}
    step = dq.compress(mapped(local, mesh, **specs), "data", missing_ok=True)
    with pytest.raises(ValueError, match="specs=None"):
        step(PARAMS, X, Y)
    with pytest.raises(ValueError, match="all_reduce_gradients"):
        dq.compress(local, "data", method="ef+bf16", missing_ok=True)


@pytest.mark.parametrize("of_gradients", (False, True))
def test_sums_of_a_solver_stay_exact_unless_a_rule_asks_for_them(of_gradients, data_mesh):
    """Such as products with a curvature, by conjugate gradients."""

    def step(params, x, y):
        g = lax.pmean(jax.grad(loss_fn)(params, x, y), "data")

        def product(u):
            terms = jax.tree.map(lambda g: g * jnp.sum(x), g)
            if of_gradients:
                terms = jax.grad(loss_fn)(params, x, y)
            return jax.tree.map(lambda u, term: u + 0.1 * lax.pmean(term, "data"), u, terms)

        return jax.scipy.sparse.linalg.cg(product, g, maxiter=2)[0], g

    whole = mapped(step, data_mesh(2), out=(P(), P()), check_vma=False)
    compressed = dq.compress(whole, "data", method="exact")
    for got, wanted in zip(compressed(PARAMS, X, Y), jax.jit(whole)(PARAMS, X, Y), strict=True):
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), got, wanted)
    assert len(compressed.report(PARAMS, X, Y).compressed) == 2
    with pytest.raises(ValueError, match="inside of 'custom_linear_solve'"):
        dq.compress(whole, "data", only=lambda each: True)(PARAMS, X, Y)
