"""Sums in loops: gradients that leave a loop are done once behind it, and others stay inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import (
    PARAMS,
    X,
    Y,
    every_sum,
    mapped,
    mean_loss,
    normal,
    own_gradient,
    parts,
)
from tests.compress.test_schedule import METHOD, found_in, text_of
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC

LAYERS = {
    "w": normal(3, 32, 32, scale=1 / 6, seed=1),
    "b": jnp.ones((3, 32)),
    "scale": jnp.ones((3, 32)),
}


def of_mean(mesh, params):
    """Collectives of the mean of a tree by hand."""

    def local(params):
        return dq.pmean(params, "data", key=jax.random.key(0), method=METHOD)

    mean = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())
    rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), params)
    return collectives(text_of(mean, rows))


def deep_loss(params, x, y, turn=None):
    """Layers in a scan, with a bias and a scale of each and a bias that all share."""

    def layer(hidden, weights):
        hidden = hidden @ weights["w"] + weights["b"][None] + params["shared"][None]
        return jnp.tanh(hidden * weights["scale"][None]), None

    hidden, _ = lax.scan((turn or (lambda f: f))(layer), x @ params["w"], params["layers"])
    return lax.pmean(jnp.mean((hidden - y) ** 2), "data")


DEEP = {"w": PARAMS["w"], "layers": LAYERS, "shared": jnp.zeros(32)}


@pytest.mark.parametrize("turn", [None, jax.checkpoint])
def test_gradients_of_a_scan_are_sent_as_a_mean_of_their_tree(mesh, turn):
    """Small ones, too: biases of layers, and one whose gradient is the total of all turns."""

    def step(*args):
        return jax.grad(lambda *a: deep_loss(*a, turn))(*args)

    found = found_in(mapped(step, mesh), DEEP, X, Y)
    assert sorted(map(str, found)) == sorted(map(str, of_mean(mesh, DEEP)))
    args = (DEEP, X, Y)
    got = dq.compress(mapped(step, mesh), "data", method=METHOD)(*args)
    expected = jax.jit(mapped(step, mesh))(*args)
    for name in ("w", "layers"):
        assert 1e-8 < dq.vnmse(got[name], expected[name]) < 1e-4
    np.testing.assert_allclose(got["shared"], expected["shared"], rtol=1e-4, atol=1e-7)


def test_gradients_of_nested_scans_are_sent_once(mesh):
    """A loop over parts of the batch around a loop over layers."""

    def step(params, x, y):
        def part(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(deep_loss)(params, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(part, zeros, parts(x, y))[0]

    found = found_in(mapped(step, mesh), DEEP, X, Y)
    assert sorted(map(str, found)) == sorted(map(str, of_mean(mesh, DEEP)))
    got = dq.compress(mapped(step, mesh), "data", method=METHOD)(DEEP, X, Y)
    expected = jax.jit(mapped(step, mesh))(DEEP, X, Y)
    assert 1e-8 < dq.vnmse(got, expected) < 1e-4


@pytest.mark.parametrize("keeps", [False, True])
def test_means_leave_their_loop_as_sums_do(keeps, mesh):
    """Gradients are accumulated, and may be kept, each as a mean or times a number."""

    def step(params, x, y):
        def turn(total, batch):
            grads = own_gradient(params, *batch)
            kept = 0.1 * lax.psum(grads["w"], "data") / 3 if keeps else None
            return jax.tree.map(jnp.add, total, lax.pmean(grads, "data")), kept

        return lax.scan(turn, jax.tree.map(jnp.zeros_like, params), parts(x, y))

    whole = mapped(step, mesh)
    expected = jax.tree.leaves(jax.jit(whole)(PARAMS, X, Y))
    compressed = dq.compress(whole, "data", method=STOCHASTIC)
    report = compressed.report(PARAMS, X, Y)
    assert {(each.group, each.times) for each in report.sums} == {(0, 1)}
    shapes = sorted(each.sum.shape for each in report.compressed)
    assert shapes == [(2, 32, 32)][: int(keeps)] + 2 * [(32, 32)]
    got = jax.tree.leaves(compressed(PARAMS, X, Y))
    exactly = jax.tree.leaves(dq.compress(whole, "data", method="uncompressed")(PARAMS, X, Y))
    for one, two, wanted in zip(got, exactly, expected, strict=True):
        np.testing.assert_allclose(two, wanted, rtol=1e-5, atol=1e-7)
        assert (1e-8 if wanted.size > 32 else 0) <= dq.vnmse(one, wanted) < 1e-4


def test_means_of_16_bits_stay_in_their_loop(mesh):
    """A term may be too small to be divided, where the sum is not."""
    tiny = jnp.full((2, 32, 32), 6e-8, jnp.float16)  # the smallest number

    def step(rows):
        return lax.map(lambda row: lax.pmean(row, "data"), rows)

    whole = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    got = dq.compress(whole, "data", method="uncompressed", only=every_sum)(tiny)
    np.testing.assert_array_equal(got, tiny)


def test_a_number_over_a_sum_is_not_linear(mesh):
    def step(params, x, y):
        def turn(total, row):
            return total + 1.0 / lax.psum(jnp.exp(params["w"]) + row[None] ** 2, "data"), None

        return lax.scan(turn, jnp.zeros_like(params["w"]), x)[0]

    whole = mapped(step, mesh)
    got = dq.compress(whole, "data", method="uncompressed", only=every_sum)(PARAMS, X, Y)
    np.testing.assert_allclose(got, jax.jit(whole)(PARAMS, X, Y), rtol=1e-5)


def test_means_outside_of_loops_keep_their_bits(mesh):
    def step(params, x, y):
        return jax.tree.map(lambda leaf: 0.1 * lax.psum(leaf, "data"), own_gradient(params, x, y))

    whole = mapped(step, mesh)
    got = dq.compress(whole, "data", method=METHOD)(PARAMS, X, Y)
    np.testing.assert_array_equal(got["b"], jax.jit(whole)(PARAMS, X, Y)["b"])


@pytest.mark.parametrize("first", [lambda leaf: leaf, jnp.ones_like])
def test_totals_that_begin_elsewhere_stay_in_their_loop(first, mesh):
    """What they begin with would be rounded, or be summed over the workers."""

    def step(params, x, y):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(mean_loss)(params, *batch)), None

        return lax.scan(add, jax.tree.map(first, params), parts(x, y))[0]

    compressed = dq.compress(mapped(step, mesh), "data", method="uncompressed")
    report = compressed.report(PARAMS, X, Y)
    assert {each.times for each in report.sums} == {2}
    expected = jax.jit(mapped(step, mesh))(PARAMS, X, Y)
    for got, wanted in zip(
        jax.tree.leaves(compressed(PARAMS, X, Y)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


# Functions of the totals, the gradients and the parameters of a turn to the next totals.
OTHER_TOTALS = {
    "added to the other one": lambda t, g, p: (t[1] + g["w"], t[0] + g["v"]),
    "decayed": lambda t, g, p: (t[0] * 0.5 + g["w"],),
    "of a term that is the same on all workers": lambda t, g, p: (t[0] + g["w"] + p["w"],),
    "both are one output": lambda t, g, p: 2 * (t[0] + g["w"],),
    "added to itself": lambda t, g, p: (t[0] + t[0] + g["w"],),
    "of the turn before": lambda t, g, p: (g["w"], t[0] + p["v"] + 0 * t[1]),
    "through both": lambda t, g, p: (g["w"], t[0] + g["v"]),
    "read in each turn": lambda t, g, p: (t[0] + g["w"], t[1] + t[0][0, 0]),
}


def with_totals(following, loop):
    """A step whose totals begin with two zeros, or as many as there are."""

    def step(params, x, y):
        def turn(totals, batch):
            new = following(totals, jax.grad(mean_loss)(params, *batch), params)
            return (*new, *totals[len(new) :]), None

        zeros = (jnp.zeros_like(params["w"]),) * 2
        if loop == "scan":
            return lax.scan(turn, zeros, parts(x, y))[0]
        first = parts(x, y)[0][0], parts(x, y)[1][0]
        turns = lambda carry: (carry[0] + 1, turn(carry[1], first)[0])  # noqa: E731
        return lax.while_loop(lambda carry: carry[0] < 2, turns, (0, zeros))[1]

    return step


@pytest.mark.sampled(5)
@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("name", OTHER_TOTALS)
def test_totals_that_are_used_otherwise_keep_their_values(name, loop, mesh):
    whole = mapped(with_totals(OTHER_TOTALS[name], loop), mesh)
    expected = jax.tree.leaves(jax.jit(whole)(PARAMS, X, Y))
    exactly = dq.compress(whole, "data", method="uncompressed")(PARAMS, X, Y)
    for got, wanted in zip(jax.tree.leaves(exactly), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
    got = dq.compress(whole, "data", method=METHOD)(PARAMS, X, Y)
    assert 1e-9 < dq.vnmse(jax.tree.leaves(got), expected) < 1e-4
