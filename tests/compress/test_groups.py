"""Groups of sums: each has its own kind, and only linear equations come in front of a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, loss_fn, mapped, mean_loss, own_gradient, parts

METHOD = "bf16"
ARGS = (PARAMS, X, Y)


@pytest.fixture(scope="module")
def two_by_two():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("data", "local"), axis_types=(AxisType.Auto,) * 2)


def check(step, args=ARGS, *, axis_name="data", **options):
    """Compare a step with itself, compressed by a method that does not round and by one that does.

    Returns:
      The report.
    """
    expected = jax.jit(step)(*args)
    exactly = dq.compress(step, axis_name, method="uncompressed", **options)(*args)
    for got, wanted in zip(jax.tree.leaves(exactly), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
    compressed = dq.compress(step, axis_name, method=METHOD, **options)
    for got, wanted in zip(
        jax.tree.leaves(compressed(*args)), jax.tree.leaves(expected), strict=True
    ):
        assert dq.vnmse(got, wanted) < 1e-4
    return compressed.report(*args)


NOT_LINEAR = {
    "a product of two sums": lambda w, v: lax.psum(w, "data") * lax.psum(v, "data"),
    "a quotient of two sums": lambda w, v: lax.psum(w, "data") / (1e3 + lax.psum(v, "data")),
    "a square": lambda w, v: lax.psum(w, "data") ** 2,
    "a largest element": lambda w, v: jnp.max(lax.psum(w, "data"), axis=0),
    "a norm": lambda w, v: jnp.sqrt(jnp.sum(lax.psum(w, "data") ** 2)),
    "an absolute value": lambda w, v: jnp.abs(lax.psum(w, "data")),
    "a sum of a sum and a value": lambda w, v: lax.psum(w, "data") + 1.0,
    "a sum that is added to itself": lambda w, v: (lambda s: s + s)(lax.psum(w, "data")),
    "a sum that is used twice": lambda w, v: (lambda s: (s.sum(0), s.T))(lax.psum(w, "data")),
    "a cumulative sum": lambda w, v: jnp.cumsum(lax.psum(w, "data"), axis=0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_equations_behind_sums_keep_their_values(name, mesh):
    def step(params, x, y):
        grads = own_gradient(params, x, y)
        return NOT_LINEAR[name](grads["w"], grads["v"])

    report = check(mapped(step, mesh))
    assert report.num_groups == 1


def test_sums_over_other_axes_and_of_other_layouts_are_groups_of_their_own(two_by_two):
    both = ("data", "local")

    def step(params, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        w, v = grads["w"], grads["v"]
        return (
            lax.psum(w, both),
            lax.psum(lax.psum(v, "data"), "local"),
            lax.all_gather(lax.psum_scatter(w, "data", scatter_dimension=0, tiled=True), "data"),
            lax.all_gather(lax.psum_scatter(v, "data", scatter_dimension=1, tiled=True), "data"),
        )

    specs = (P(), P(both), P(both))
    whole = mapped(
        step, two_by_two, specs=specs, out=(P(), P(), P("local"), P("local")), check_vma=False
    )
    report = check(whole, axis_name=both)
    assert report.num_groups == 4
    assert {each.sum.axes for each in report.compressed} == {both, ("data",)}
    alone = [each for each in report.sums if each.sum.axes == ("local",)]
    assert [each.why_exact for each in alone] == ["over 'local', without the slow axis 'data'"]


def test_a_small_sum_of_another_layout_stays_as_it_is(mesh):
    def step(params, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        return lax.psum(grads["w"], "data"), lax.psum_scatter(grads["b"], "data", tiled=True)

    report = check(mapped(step, mesh, out=(P(), P("data")), check_vma=False))
    assert [each.why_exact is None for each in report.sums] == [True, False]


def test_gathers_along_any_dimension(mesh):
    def step(params, x, y):
        rows = lax.all_gather(params, "data", axis=0, tiled=True)
        columns = lax.all_gather(params, "data", axis=1, tiled=True)
        return rows, columns, lax.all_gather(params, "data", axis=1)

    specs = (P("data"), P("data"), P("data"))
    whole = mapped(step, mesh, specs=specs, out=(P(),) * 3, check_vma=False)
    report = check(whole, (PARAMS["w"], X, Y), operations=("all_gather",))
    assert report.num_groups == 3


def test_the_slow_axis_is_the_one_that_sends_fewer_bytes(two_by_two):
    """Of two axes, only parts of a sum cross the slow one, whatever the order in the step."""

    def step(params, x, y):
        return jax.grad(lambda p: lax.pmean(loss_fn(p, x, y), ("local", "data")))(params)

    specs = (P(), P(("data", "local")), P(("data", "local")))
    whole = mapped(step, two_by_two, specs=specs)
    one = dq.compress(whole, ("data", "local"), method=METHOD).report(*ARGS).compressed
    other = dq.compress(whole, "data", method=METHOD).report(*ARGS).compressed
    for part, full in zip(one, other, strict=True):
        assert part.bytes_after == pytest.approx(full.bytes_after / 2)
    text = jax.jit(dq.compress(whole, ("data", "local"), method=METHOD)).lower(*ARGS).compile()
    moved = [line for line in text.as_text().splitlines() if " collective-permute(" in line]
    assert moved
    assert all("{0,2},{2,0}" in line for line in moved)  # workers with one place on "local"


def test_a_small_sum_that_a_large_one_needs_does_not_split_the_group(mesh):
    """The number of rows of all workers, by which gradients are divided before their sum."""

    def step(params, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        count = lax.psum(jnp.sum(x[:, 0] > 0).astype(jnp.float32), "data")
        return lax.psum(grads["w"] / count, "data"), lax.psum(grads["v"], "data")

    report = check(mapped(step, mesh, check_vma=False))
    assert report.num_groups == 1
    assert len(report.compressed) == 2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scale", [lambda g: g, lambda g: g / 2, lambda g: 0.5 * g])
def test_scaled_means_that_are_added_are_one_sum(scale, check_vma, mesh):
    """Micro-batches in a loop of Python, and what is not added: that keeps its rounding."""

    def step(params, x, y):
        total = jnp.zeros((32, 32))
        for xs, ys in zip(*parts(x, y), strict=True):
            total += scale(lax.pmean(own_gradient(params, xs, ys)["w"], "data"))
        return total, 0.5 * lax.pmean(own_gradient(params, x, y)["v"], "data")

    found = check(mapped(step, mesh, check_vma=check_vma)).compressed
    assert sorted(each.sum.shape for each in found) == [(32, 32), (32, 32)]


@pytest.mark.parametrize("alone", [False, True])
def test_small_sums_that_leave_a_loop_alone_are_summed(alone, mesh):
    """The large ones of the loop stay inside: the next turn needs them."""

    def step(params, x, y):
        def turn(params, batch):
            grads = jax.grad(mean_loss)(params, *batch)
            row = grads["b"] if alone else grads["b"] + grads["v"][0]
            return {**params, "w": params["w"] - grads["w"]}, row

        final, rows = lax.scan(turn, params, parts(x, y))
        return final["w"], rows

    report = check(mapped(step, mesh))
    assert {each.times for each in report.compressed} == {2}
    if alone:
        (small,) = [each for each in report.sums if not each.is_compressed and each.sum.shape]
        assert (small.sum.shape, small.times) == ((2, 32), 1)


def test_sums_of_a_forward_pass_that_leave_a_loop_stay_exact(mesh):
    """Small in each turn, and large together."""

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["w"])
        mean = lax.psum(jnp.mean(hidden, 0), "data")
        return lax.pmean(jnp.mean((hidden - y) ** 2), "data"), mean

    def step(params, x, y):
        def part(total, batch):
            grads, mean = jax.grad(loss, has_aux=True)(params, *batch)
            return total + grads["w"], mean

        batches = [jnp.tile(each, (8, 1)).reshape(32, -1, 32) for each in (x, y)]
        return lax.scan(part, jnp.zeros((32, 32)), tuple(batches))

    whole = mapped(step, mesh, out=(P(), P()))
    compressed = dq.compress(whole, "data", method=METHOD)
    got, expected = compressed(*ARGS), jax.jit(whole)(*ARGS)
    assert expected[1].size >= dq.Compression().exact_below > expected[1][0].size
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-7)
    assert 1e-8 < dq.vnmse(got[0], expected[0]) < 1e-4


def test_the_report_has_each_sum_once_in_the_shape_that_is_sent(mesh):
    """Also where a loop was scheduled twice, since a total of its turns is none after all."""

    def step(params, x, y):
        def again(_, value):
            return lax.pcast(lax.psum(value, "data") * 0.1, "data", to="varying")

        def turn(totals, batch):
            grads = jax.grad(mean_loss)(params, *batch)
            inside = lax.fori_loop(0, 3, again, batch[0][0, :8])
            total = lax.psum(inside, "data")
            kept = totals[0] + grads["w"] + params["w"]  # no sum, so that it stays in the loop
            return (kept, totals[1] + grads["v"]), (grads["b"], total)

        zeros = jnp.zeros((32, 32))
        return lax.scan(turn, (zeros, zeros), parts(x, y))

    report = dq.compress(mapped(step, mesh), "data", method=METHOD).report(*ARGS)
    shapes = sorted(each.sum.shape for each in report.sums)
    assert shapes == [(2, 8), (2, 32), (8,), (32, 32), (32, 32)]

    def stacked(params, x, y):
        grads = lax.map(lambda batch: jax.grad(mean_loss)(params, *batch), parts(x, y))
        return grads

    report = dq.compress(mapped(stacked, mesh), "data", method=METHOD).report(*ARGS)
    assert sorted(each.sum.shape for each in report.sums) == [(2, 32), (2, 32, 32), (2, 32, 32)]


def test_shardings_of_a_jit_inside_of_a_step_are_kept(mesh):
    sharded = jax.NamedSharding(mesh, P("data"))
    inner = jax.jit(mapped(lambda *a: jax.grad(mean_loss)(*a)["w"], mesh), out_shardings=sharded)
    compressed = dq.compress(lambda *a: inner(*a), "data", method=METHOD)
    assert compressed(*ARGS).sharding.is_equivalent_to(sharded, 2)
