"""Specs of sums follow from the parameters that they update, where these have shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, loss_fn, mean_loss

METHOD = "bf16"
SPECS = {"w": P("fsdp"), "v": P(None, "fsdp"), "b": P()}
OPTIONS = {"method": METHOD, "options": dq.Options(exact_below=64)}
MAP = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "axis_names": {"data"}}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )


@pytest.fixture
def shardings(mesh):
    return {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}


@pytest.fixture
def args(mesh, shardings):
    rows = jax.NamedSharding(mesh, P("data"))
    return jax.device_put(PARAMS, shardings), *jax.device_put((X, Y), rows)


def update(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def update_inside(mesh, gradient=lambda *a: jax.grad(mean_loss)(*a)):
    """Return a step that updates inside of its map."""
    return jax.shard_map(lambda p, x, y: update(p, gradient(p, x, y)), mesh=mesh, **MAP)


def update_outside(mesh):
    gradient = jax.shard_map(lambda *a: jax.grad(mean_loss)(*a), mesh=mesh, **MAP)
    return lambda params, x, y: update(params, gradient(params, x, y))


def with_momentum(mesh):
    tx = optax.chain(optax.trace(0.9), optax.scale(-0.1))

    def local(params, x, y):
        grads = lax.pmean(jax.grad(loss_fn)(params, x, y), "data")
        updates, _ = tx.update(grads, tx.init(params))
        return optax.apply_updates(params, updates)

    return jax.shard_map(local, mesh=mesh, check_vma=False, **MAP)


def jitted_inside(mesh):
    """The shardings of the arguments are those that the inner function fixes."""
    placed = {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    rows = jax.NamedSharding(mesh, P("data"))
    inner = jax.jit(update_inside(mesh), in_shardings=(placed, rows, rows))
    return lambda *args: inner(*args)


def in_a_loop(mesh):
    """The gradients of two parts of the batch are added up first."""

    def gradient(params, x, y):
        def part(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(mean_loss)(params, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(part, zeros, (x.reshape(2, -1, 32), y.reshape(2, -1, 32)))[0]

    return update_inside(mesh, gradient)


def constrained(mesh):
    def gradient(params, x, y):
        grads = jax.grad(mean_loss)(params, x, y)
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, SPECS)

    return update_inside(mesh, gradient)


STEPS = (update_inside, update_outside, with_momentum, jitted_inside, in_a_loop, constrained)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", STEPS)
def test_specs_of_sums_are_those_of_their_parameters(make, mesh, args):
    step = make(mesh)
    given = args if make is not constrained else (PARAMS, X, Y)
    compressed = dq.compress(step, "data", **OPTIONS)
    report = compressed.report(*given)
    halves = [each for each in report.compressed if each.sum.shape == (32, 32)]
    assert len(halves) == 2
    whole = dq.compress(step, "data", specs=P(), **OPTIONS).report(*given)
    for half, full in zip(halves, whole.compressed, strict=True):
        assert half.bytes_after == pytest.approx(full.bytes_after / 2)
        assert half.bytes_before == pytest.approx(full.bytes_before / 2)
    expected = jax.jit(step)(*args)
    got = compressed(*given)
    change = [jax.tree.map(jnp.subtract, tree, PARAMS) for tree in (got, expected)]
    assert 1e-8 < dq.vnmse(*change) < 1e-4
    for name in "wv":
        np.testing.assert_allclose(got[name], expected[name], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["unknown", "two", "traced"])
def test_specs_that_are_not_certain_are_an_error(kind, mesh, args, shardings):
    """No shardings, different ones, or arguments of another trace."""
    step = update_inside(mesh)
    if kind == "two":

        def twice(params, others, x, y):
            return jax.tree.map(jnp.add, update_inside(mesh)(params, x, y), others)

        swapped = {"w": shardings["v"], "v": shardings["w"], "b": shardings["b"]}
        others = jax.device_put(PARAMS, swapped)
        step, args = twice, (args[0], others, *args[1:])
    compressed = dq.compress(step, "data", **OPTIONS)
    given = (PARAMS, X, Y) if kind == "unknown" else args
    run = jax.jit(compressed) if kind == "traced" else compressed
    with pytest.raises(ValueError, match="specs=None, but the compiler manages axis 'fsdp'"):
        run(*given)


def test_another_sharding_is_another_program(mesh, args):
    compressed = dq.compress(update_inside(mesh), "data", **OPTIONS)
    split = compressed.report(*args).compressed
    whole = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    first, second = compressed(*args), compressed(whole, *args[1:])
    full = compressed.report(whole, *args[1:]).compressed
    assert [each.bytes_after for each in full] == [2 * each.bytes_after for each in split]
    for name in "wv":
        np.testing.assert_allclose(first[name], second[name], rtol=1e-2, atol=1e-3)
