"""Order and number of collectives of compressed steps, as the compiled program has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import FORMS, KEYS, PARAMS, X, Y, loss_fn, mapped, mean_loss, own_gradient
from tests.support.hlo import collectives, unordered

METHOD = "bf16"
LAYERS = {
    "w": jax.random.normal(KEYS[1], (3, 32, 32)) / 6,
    "b": jnp.ones((3, 32)),
    "scale": jnp.ones((3, 32)),
}


def key_of(*args):
    return jax.random.key(0)


@pytest.fixture
def mesh(data_mesh):
    return data_mesh(2)


def text_of(step, *args):
    return jax.jit(step).lower(*args).compile().as_text()


def found_in(step, *args, **options):
    options = {"key": key_of, "method": METHOD} | options
    return collectives(text_of(dq.compress(step, "data", **options), *args))


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
        return lax.scan(part, zeros, (x.reshape(2, 4, 32), y.reshape(2, 4, 32)))[0]

    found = found_in(mapped(step, mesh), DEEP, X, Y)
    assert sorted(map(str, found)) == sorted(map(str, of_mean(mesh, DEEP)))
    got = dq.compress(mapped(step, mesh), "data", method=METHOD)(DEEP, X, Y)
    expected = jax.jit(mapped(step, mesh))(DEEP, X, Y)
    assert 1e-8 < dq.vnmse(got, expected) < 1e-4


def test_totals_that_begin_elsewhere_stay_in_their_loop(mesh):
    """What they begin with would be rounded, or be summed over the workers."""

    def step(params, x, y):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(mean_loss)(params, *batch)), None

        return lax.scan(add, params, (x.reshape(2, 4, 32), y.reshape(2, 4, 32)))[0]

    compressed = dq.compress(mapped(step, mesh), "data", method="uncompressed")
    report = compressed.report(PARAMS, X, Y)
    assert {each.times for each in report.sums} == {2}
    expected = jax.jit(mapped(step, mesh))(PARAMS, X, Y)
    for got, wanted in zip(
        jax.tree.leaves(compressed(PARAMS, X, Y)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def _swapped(params, x, y):
    """Each turn adds to the total of the other one."""

    def turn(totals, batch):
        grads = jax.grad(mean_loss)(params, *batch)
        return (totals[1] + grads["w"], totals[0] + grads["v"]), None

    zeros = jnp.zeros_like(params["w"])
    batches = (x.reshape(2, 4, 32), y.reshape(2, 4, 32))
    return lax.scan(turn, (zeros, zeros), batches)[0]


def _read(params, x, y):
    """Each turn reads the total so far."""

    def turn(total, batch):
        grads = jax.grad(mean_loss)(params, *batch)["w"]
        return total + grads, jnp.sum(total)

    batches = (x.reshape(2, 4, 32), y.reshape(2, 4, 32))
    return lax.scan(turn, jnp.zeros_like(params["w"]), batches)


def _decayed(params, x, y):
    def turn(total, batch):
        return total * 0.5 + jax.grad(mean_loss)(params, *batch)["w"], None

    batches = (x.reshape(2, 4, 32), y.reshape(2, 4, 32))
    return lax.scan(turn, jnp.zeros_like(params["w"]), batches)[0]


def _regularized(params, x, y):
    """A term that is the same on all workers must not be summed over them."""

    def turn(total, batch):
        grads = jax.grad(mean_loss)(params, *batch)["w"]
        return total + grads + params["w"], None

    batches = (x.reshape(2, 4, 32), y.reshape(2, 4, 32))
    return lax.scan(turn, jnp.zeros_like(params["w"]), batches)[0]


def _twice(params, x, y):
    """Both carries are one output."""

    def turn(totals, batch):
        both = totals[0] + jax.grad(mean_loss)(params, *batch)["w"]
        return (both, both), None

    zeros = jnp.zeros_like(params["w"])
    return lax.scan(turn, (zeros, zeros), (x.reshape(2, 4, 32), y.reshape(2, 4, 32)))[0]


def _while_twice(params, x, y):
    def turn(carry):
        count, first, _ = carry
        both = first + jax.grad(mean_loss)(params, x, y)["w"]
        return count + 1, both, both

    zeros = jnp.zeros_like(params["w"])
    return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, zeros, zeros))[1:]


def _doubled(params, x, y):
    """The total is added to itself."""

    def turn(total, batch):
        return total + total + jax.grad(mean_loss)(params, *batch)["w"], None

    batches = (x.reshape(2, 4, 32), y.reshape(2, 4, 32))
    return lax.scan(turn, jnp.zeros_like(params["w"]), batches)[0]


OTHER_TOTALS = (
    _swapped,
    _read,
    _decayed,
    _regularized,
    _twice,
    _while_twice,
    _doubled,
)


@pytest.mark.parametrize("step", OTHER_TOTALS)
def test_totals_that_are_used_otherwise_keep_their_values(step, mesh):
    whole = mapped(step, mesh)
    expected = jax.tree.leaves(jax.jit(whole)(PARAMS, X, Y))
    exactly = dq.compress(whole, "data", method="uncompressed")(PARAMS, X, Y)
    for got, wanted in zip(jax.tree.leaves(exactly), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
    got = dq.compress(whole, "data", method=METHOD)(PARAMS, X, Y)
    assert 1e-9 < dq.vnmse(jax.tree.leaves(got), expected) < 1e-4


def test_sums_whose_results_are_not_used_are_not_sent(mesh):
    """Alone, beside others of the same equation, and inside of a loop."""

    def with_unused(params, x, y):
        grads = own_gradient(params, x, y)
        lax.psum(grads["w"] * 2, "data")
        both = lax.psum((grads["w"], grads["v"]), "data")

        def turn(carry, row):
            unused = lax.psum(grads["v"] * row, "data")
            return (carry[0] + lax.psum(grads["w"] * row, "data"), unused), None

        zeros = jnp.zeros((32, 32))
        total = lax.scan(turn, (zeros, zeros), jnp.arange(2.0))[0][0]
        return both[0], total

    def without(params, x, y):
        grads = own_gradient(params, x, y)

        def turn(carry, row):
            return carry + lax.psum(grads["w"] * row, "data"), None

        total = lax.scan(turn, jnp.zeros((32, 32)), jnp.arange(2.0))[0]
        return lax.psum(grads["w"], "data"), total

    found, expected = (
        found_in(mapped(step, mesh), PARAMS, X, Y) for step in (with_unused, without)
    )
    assert expected
    assert sorted(map(str, found)) == sorted(map(str, expected))


def _loop(values):
    return lax.fori_loop(0, 3, lambda _, v: lax.pmean(v, "data") + 0 * v, values)


AROUND = [(0, 1), (1, 2), (2, 3), (3, 0)]
OTHERS = {
    "pmax": lambda rows: lax.pmax(rows, "data"),
    "ppermute": lambda rows: lax.ppermute(rows, "data", AROUND),
    "all_to_all": lambda rows: lax.all_to_all(rows, "data", 0, 0, tiled=True),
    "all_gather": lambda rows: lax.all_gather(rows, "data")[0],
    "a loop": _loop,
    "a branch": lambda rows: lax.cond(rows[0, 0] > 1e9, _loop, lambda r: r + 1, rows),
    "a loop of permutations": lambda rows: lax.fori_loop(
        0, 3, lambda _, v: lax.ppermute(v, "data", AROUND), rows
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("check_vma", [False, True])
def test_other_messages_of_a_step_wait_for_its_compressed_sums(name, check_vma, data_mesh):
    """And compressed sums, loops on four workers, wait for them: none needs another one."""

    def step(params, x, y):
        own = lax.pcast(params, "data", to="varying") if check_vma else params
        grads = jax.grad(loss_fn)(own, x, y)
        before = OTHERS[name](x)
        first = lax.pmean(grads["w"], "data")
        shift = jnp.sum(first) * 1e-9
        after = OTHERS[name](y + shift)  # behind the first group, as the second group is
        second = lax.pmean(grads["v"] + shift, "data")
        return first, second, before[None], after[None]

    out = (P(), P(), P("data"), P("data"))
    whole = mapped(step, data_mesh(4), out=out, check_vma=check_vma)
    compressed = dq.compress(whole, "data", method=METHOD)
    assert compressed.report(PARAMS, X, Y).num_groups == 2
    assert unordered(text_of(compressed, PARAMS, X, Y)) == []
    for got, wanted in zip(
        compressed(PARAMS, X, Y)[2:], jax.jit(whole)(PARAMS, X, Y)[2:], strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_loops_with_compressed_sums_wait_for_each_other(mesh):
    def step(params, x, y):
        def turn(carry):
            count, params = carry
            return count + 1, jax.tree.map(jnp.subtract, params, jax.grad(mean_loss)(params, x, y))

        loop = lambda params: lax.while_loop(lambda c: c[0] < 2, turn, (0, params))[1]  # noqa: E731
        first = loop(params)
        other = loop(jax.tree.map(lambda leaf: 2 * leaf, params))
        return first, other, lax.pmean(own_gradient(params, x, y), "data")

    compressed = dq.compress(mapped(step, mesh), "data", method=METHOD)
    assert unordered(text_of(compressed, PARAMS, X, Y)) == []


def test_sums_in_the_order_of_the_step_whatever_the_form(mesh):
    """Two groups of which the second needs the first are sent in this order."""
    form = FORMS["two_models_one_after_the_other"](mesh)
    report = dq.compress(form.step, "data", method=METHOD).report(*form.args)
    assert [each.group for each in report.compressed] == [0, 0, 1, 1]
