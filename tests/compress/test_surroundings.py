"""Everything that is around a compressed step, or inside of it, and is no sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, loss_fn, mapped, mean_loss, own_gradient, parts

METHOD = "bf16"
ARGS = (PARAMS, X, Y)


def gradient(*args):
    return jax.grad(mean_loss)(*args)


def close(got, expected):
    """Return whether large sums are rounded, and nothing else differs."""
    return 1e-8 < dq.vnmse(got, expected) < 1e-4


def test_prints_of_a_step_are_printed_once_for_each_worker(mesh, capfd):
    def step(params, x, y):
        grads = own_gradient(params, x, y)
        jax.debug.print("before {}", jnp.float32(1))
        total = lax.pmean(grads, "data")
        jax.debug.print("behind {}", jnp.isfinite(jnp.sum(total["w"])))
        return total

    got = dq.compress(mapped(step, mesh), "data", method=METHOD)(*ARGS)
    jax.block_until_ready(got)
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["before 1.0"] * 2 + ["behind True"] * 2


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_effects_of_a_loop_that_holds_a_sum_happen_in_every_turn(mesh, loop):
    seen = []

    def note(number):
        seen.append(int(number))

    def step(params, x, y):
        def turn(carry):
            count, params = carry
            io_callback(note, None, count)
            return count + 1, jax.tree.map(jnp.subtract, params, gradient(params, x, y))

        if loop == "while":
            return lax.while_loop(lambda c: c[0] < 3, turn, (0, params))[1]
        return lax.scan(lambda c, _: (turn(c), None), (0, params), None, length=3)[0][1]

    step = mapped(step, mesh)
    jax.block_until_ready(dq.compress(step, "data", method=METHOD)(*ARGS))
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_an_effect_alone_keeps_what_it_needs(mesh):
    """Its argument is used nowhere else."""
    seen = []

    def step(params, x, y):
        grads = lax.pmean(own_gradient(params, x, y), "data")
        io_callback(lambda value: seen.append(float(value)), None, jnp.sum(grads["v"] ** 2))
        return grads["w"]

    got = dq.compress(mapped(step, mesh), "data", method=METHOD)(*ARGS)
    jax.block_until_ready(got)
    jax.effects_barrier()
    expected = jax.jit(mapped(lambda *a: lax.pmean(own_gradient(*a), "data")["v"], mesh))(*ARGS)
    np.testing.assert_allclose(seen, [float(jnp.sum(expected**2))] * 2, rtol=1e-2)
    assert seen[0] != float(jnp.sum(expected**2))


def test_names_of_scopes_are_around_compressed_sums(mesh):
    def step(params, x, y):
        with jax.named_scope("the_loop"):

            def turn(total, batch):
                with jax.named_scope("the_sum"):
                    return total * 0.5 + lax.pmean(own_gradient(params, *batch)["w"], "data"), None

            batches = parts(x, y)
            return lax.scan(turn, jnp.zeros((32, 32)), batches)[0]

    compressed = dq.compress(mapped(step, mesh), "data", method=METHOD)
    (each,) = compressed.report(*ARGS).compressed
    assert "the_loop" in each.sum.scopes
    assert "the_sum" in each.sum.scopes
    assert each.sum.source.partition(":")[0].endswith("test_surroundings.py")
    assert "(test_names_of_scopes" in each.sum.source
    assert "the_loop" in jax.jit(compressed).lower(*ARGS).compile().as_text()


def test_a_step_runs_under_disable_jit():
    """Operations one by one, in `jax.vmap`: `shard_map` is slow there, with or without a wrap."""

    def step(params, x, y):
        return lax.pmean(jax.grad(loss_fn)(params, x, y)["w"], "data")

    args = (PARAMS, X.reshape(2, -1, 32), Y.reshape(2, -1, 32))
    over_workers = lambda step: jax.vmap(step, (None, 0, 0), axis_name="data")  # noqa: E731
    expected = over_workers(step)(*args)
    with jax.disable_jit():
        got = over_workers(dq.compress(step, "data", method=METHOD))(*args)
    assert close(got, expected)


def test_a_step_in_a_vmap_sums_for_every_model(mesh):
    """Outside of the map over workers, the vmap has all compressed sums at once."""
    models = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf]), PARAMS)
    step = mapped(lambda *a: lax.pmean(jax.grad(loss_fn)(*a), "data"), mesh, check_vma=False)
    compressed = dq.compress(step, "data", method=METHOD)
    expected = jax.jit(jax.vmap(step, (0, None, None)))(models, X, Y)
    got = jax.jit(jax.vmap(compressed, (0, None, None)))(models, X, Y)
    for number in range(3):
        of_model = [jax.tree.map(lambda leaf, n=number: leaf[n], tree) for tree in (got, expected)]
        assert close(*of_model)


def test_a_checkpoint_around_a_step_changes_nothing(mesh):
    compressed = dq.compress(mapped(gradient, mesh), "data", method=METHOD)
    around = jax.jit(jax.checkpoint(compressed))
    np.testing.assert_array_equal(around(*ARGS)["w"], compressed(*ARGS)["w"])


@pytest.mark.parametrize("transformed", ["grad", "jvp", "inside"])
def test_derivatives_of_a_step_are_refused(mesh, transformed):
    """Their sums would be those of the compressed collective, in either direction."""

    def of_worker(params, x, y):
        return lax.pmean(own_gradient(params, x, y), "data")

    compressed = dq.compress(mapped(of_worker, mesh), "data", method=METHOD)
    loss = lambda params: jnp.sum(compressed(params, X, Y)["w"])  # noqa: E731
    with pytest.raises(Exception, match=r"differentiated|gradient"):
        if transformed == "grad":
            jax.jit(jax.grad(loss))(PARAMS)
        elif transformed == "jvp":
            jax.jit(lambda params: jax.jvp(loss, (params,), (params,)))(PARAMS)
        else:
            inside = dq.compress(of_worker, "data", method=METHOD)
            local = lambda *a: jax.grad(lambda p: jnp.sum(inside(p, *a[1:])["w"]))(a[0])  # noqa: E731
            jax.jit(mapped(local, mesh))(*ARGS)


def test_donated_buffers_of_a_plain_step_are_those_of_the_jit_inside(mesh):
    """A part of the arguments is donated, by name and by number; the rest is left."""

    def update(state, batch, *, rate):
        grads = mapped(gradient, mesh)(state["params"], *batch)
        return {
            "params": jax.tree.map(lambda p, g: p - rate * g, state["params"], grads),
            "count": state["count"] + 1,
        }

    def fresh():
        state = {"params": jax.tree.map(jnp.array, PARAMS), "count": jnp.int32(0)}
        return jax.device_put(state, jax.NamedSharding(mesh, P()))

    for jitted in (jax.jit(update, donate_argnums=0), jax.jit(update, donate_argnames="state")):
        inside = lambda state, batch, rate, f=jitted: f(state, batch, rate=rate)  # noqa: E731
        for fun in (jitted, inside):
            state, batch = fresh(), (jnp.array(X), jnp.array(Y))
            rate = jnp.float32(0.1)
            new = dq.compress(fun, "data", method=METHOD)(state, batch, rate=rate)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))
            assert not any(leaf.is_deleted() for leaf in batch)
            assert int(new["count"]) == 1


def test_a_buffer_that_is_used_behind_the_jit_is_not_taken(mesh):
    jitted = jax.jit(mapped(gradient, mesh), donate_argnums=0)

    def step(params, x, y):
        grads = jitted(params, x, y)
        return grads, jax.tree.map(lambda p: 2 * p, params)

    params = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    params = jax.tree.map(jnp.array, params)
    _, doubled = dq.compress(step, "data", method=METHOD)(params, X, Y)
    np.testing.assert_array_equal(doubled["w"], 2 * PARAMS["w"])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_numbers_of_64_bits_are_summed_by_methods_of_32(mesh):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), ARGS)

        def step(params, x, y):
            return lax.pmean(jax.grad(loss_fn)(params, x, y), "data"), lax.psum(
                jnp.sum(x, dtype=jnp.float64), "data"
            )

        whole = mapped(step, mesh, out=(P(), P()), check_vma=False)
        got, total = dq.compress(whole, "data", method=METHOD)(*wide)
        expected, exact_total = jax.jit(whole)(*wide)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float64")}
        assert close(got, expected)
        np.testing.assert_allclose(total, exact_total, rtol=1e-14)


def test_static_arguments_shardings_and_unused_ones_are_those_of_the_jitted_step(mesh):
    sharded = jax.NamedSharding(mesh, P("data"))
    whole = jax.NamedSharding(mesh, P())

    def step(params, x, y, unused, scale):
        grads = mapped(gradient, mesh)(params, x, y)
        return jax.tree.map(lambda g: jnp.float32(scale) * g, grads)

    jitted = jax.jit(
        step,
        static_argnums=4,
        in_shardings=(whole, sharded, sharded, whole),
        out_shardings=whole,
        keep_unused=True,
    )
    compressed = dq.compress(jitted, "data", method=METHOD)
    args = (*ARGS, jnp.float32(0))
    for scale in (1.0, 2.0):
        assert close(compressed(*args, scale), jitted(*args, scale))
    text = compressed.lower(*args, 3.0).compile()
    assert text.input_shardings[0][1].is_equivalent_to(sharded, 2)
    assert len(jax.tree.leaves(text.input_shardings)) == len(jax.tree.leaves(args))


def test_shardings_of_results_are_those_of_a_jitted_step_inside_of_another(mesh):
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    jitted = jax.jit(lambda *args: jax.grad(loss_fn)(*args)["w"], out_shardings=rows)
    compressed = dq.compress(jitted, "data", method=METHOD, in_specs=(whole, rows, rows))
    args = jax.device_put(ARGS, (whole, rows, rows))
    for step in (jitted, compressed):
        got = jax.jit(lambda *args, step=step: step(*args))(*args)
        assert got.sharding.is_equivalent_to(rows, 2)


def test_layouts_of_results_are_those_of_the_jitted_step(mesh):
    columns = Format(Layout((1, 0)), jax.NamedSharding(mesh, P()))
    jitted = jax.jit(lambda *args: mapped(gradient, mesh)(*args)["w"], out_shardings=columns)
    compressed = dq.compress(jitted, "data", method=METHOD).lower(*ARGS).compile()
    assert compressed.output_formats.layout.major_to_minor == (1, 0)
