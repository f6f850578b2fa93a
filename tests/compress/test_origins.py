"""Sums of gradients are compressed, and no other sums, as the flow of data has it."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._rewriting.sums import ZEROS
from tests.compress.forms import every_sum
from tests.compress.origin_steps import ARGS, GRADIENTS, OTHERS, PARAMS, SIZE, grad, loss
from tests.support.hlo import collectives

STEPS = GRADIENTS | OTHERS
LARGE = dq.Compression().exact_below


def on_mesh(data_mesh, local, *, out=P(), check_vma=False):
    specs = (P(), P(), P("data"), P("data"))
    return jax.shard_map(
        local, mesh=data_mesh(2), in_specs=specs, out_specs=out, check_vma=check_vma
    )


def step_of(data_mesh, name):
    step = STEPS[name]
    return on_mesh(data_mesh, step.local, out=step.out, check_vma=step.check_vma)


def large_sums(mapped, **options):
    report = dq.compress(mapped, "data", missing_ok=True, **options).report(*ARGS)
    return [
        each
        for each in report.sums
        if math.prod(each.sum.shape) >= LARGE and each.sum.operation != "all_gather"
    ]


def origins(data_mesh, local, **how):
    """Origins of the large sums of a step, by their order in it."""
    return [each.sum.origin for each in large_sums(on_mesh(data_mesh, local, **how))]


@pytest.mark.parametrize("name", STEPS)
def test_sums_of_gradients_are_compressed_and_no_others(name, data_mesh):
    step, sums = STEPS[name], large_sums(step_of(data_mesh, name))
    kept = [each for each in sums if not each.is_compressed]
    assert len(sums) - len(kept) == step.compressed
    assert len(kept) == step.exact
    for each in sums:
        assert each.is_compressed == (each.sum.origin == "gradient")
    for each in kept:
        assert re.search(step.why, each.why_exact)


@pytest.mark.parametrize("name", OTHERS)
def test_a_rule_of_the_user_can_ask_for_more(name, data_mesh):
    seen = []
    sums = large_sums(step_of(data_mesh, name), only=lambda each: seen.append(each) or True)
    assert all(each.is_compressed for each in sums)
    assert {each.origin for each in seen} >= {each.sum.origin for each in sums}


FIRST = {"statistics_beside_gradients": lambda results: results[0]}


@pytest.mark.parametrize("name", [*FIRST, "logits_that_the_loss_gathers", "gram_matrices_of_muon"])
def test_only_the_gradients_of_such_steps_have_errors(name, data_mesh):
    """The update of Muon is as far off as that of a gradient that is rounded in front of it."""
    step = step_of(data_mesh, name)
    expected = jax.jit(step)(*ARGS)
    got = dq.compress(step, "data", method="bf16")(*ARGS)
    rounded = FIRST.get(name, lambda results: results)
    assert 1e-8 < dq.vnmse(rounded(got), rounded(expected)) < 1e-4
    if name in FIRST:
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


# Equations behind a backward pass.

KEEPING = {
    "cast": lambda g, p, s: g.astype(jnp.bfloat16).astype(jnp.float32),
    "quantized": lambda g, p, s: jnp.round(g * 1e4).astype(jnp.int8).astype(jnp.float32) * 1e-4,
    "rounded": lambda g, p, s: lax.reduce_precision(g, 8, 7),
    "bits": lambda g, p, s: lax.bitcast_convert_type(
        lax.bitcast_convert_type(g, jnp.uint32) & jnp.uint32(0xFFFF0000), jnp.float32
    ),
    "transposed": lambda g, p, s: g.T,
    "reversed": lambda g, p, s: g[::-1],
    "cut and joined": lambda g, p, s: jnp.concatenate(jnp.split(g, 2)[::-1]),
    "padded and cut": lambda g, p, s: lax.dynamic_slice(jnp.pad(g, 1), (1, 1), g.shape),
    "written": lambda g, p, s: jnp.zeros((SIZE + 8, SIZE)).at[4 : SIZE + 4].set(g)[4:-4],
    "taken": lambda g, p, s: g[jnp.arange(SIZE)[::-1]],
    "scattered": lambda g, p, s: jnp.zeros_like(g).at[jnp.arange(SIZE)].add(g),
    "scaled": lambda g, p, s: -0.1 * g / 3,
    "scaled by an argument": lambda g, p, s: g * s[0, 0],
    "scaled by its norm": lambda g, p, s: g / jnp.maximum(1, jnp.linalg.norm(g)),
    "scaled by the norm of parameters": lambda g, p, s: g * jnp.linalg.norm(p),
    "rows scaled by their norms": lambda g, p, s: g / (1 + jnp.linalg.norm(g, axis=1))[:, None],
    "weighted rows": lambda g, p, s: jnp.einsum("i,ij->ij", jnp.abs(g[:, 0]), g),
    "clipped": lambda g, p, s: jnp.clip(g, -1e-3, 1e-3),
    "where": lambda g, p, s: jnp.where(p > g, g, 0.0),
    "finite": lambda g, p, s: jnp.nan_to_num(g),
    "masked": lambda g, p, s: g * (jnp.abs(g) > 1e-4).astype(jnp.float32),
    "masked by an argument": lambda g, p, s: g * s,
    "projected by an argument": lambda g, p, s: s @ g,
    "centered": lambda g, p, s: g - g.mean(1, keepdims=True),
    "sum": lambda g, p, s: g + g.T,
    "noise": lambda g, p, s: g + jax.random.normal(jax.random.key(1), g.shape),
    "plus numbers": lambda g, p, s: g + lax.broadcasted_iota(jnp.float32, g.shape, 0),
    "accumulated": lambda g, p, s: 0.9 * s + g,
    "decayed": lambda g, p, s: g + 0.01 * p,
    "in a jit": lambda g, p, s: jax.jit(lambda g: 2 * g)(g),
    "in a scan": lambda g, p, s: lax.scan(lambda c, r: (c, r + c), s[0], g)[1] * 2,
    "stacked": lambda g, p, s: jnp.stack([g, g]).sum(0),
    "carried": lambda g, p, s: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + g, jnp.zeros_like(g)),
    "in a loop": lambda g, p, s: lax.while_loop(lambda c: c[0, 0] > 1, lambda c: c / 2, g),
    "in a branch": lambda g, p, s: lax.cond(s[0, 0] > 0, lambda: g, lambda: jnp.zeros_like(g)),
    "in a vmap": lambda g, p, s: jax.vmap(lambda row: row / (1 + jnp.sum(row**2)))(g),
    "in a checkpoint": lambda g, p, s: jax.checkpoint(lambda g: 2 * g)(g),
    "with a rule": lambda g, p, s: jax.nn.relu(g) - jax.nn.relu(-g),
    "behind a barrier": lambda g, p, s: lax.optimization_barrier((g, p))[0],
}
BREAKING = {
    "square": lambda g, p, s: g * g,
    "power": lambda g, p, s: g**3,
    "product": lambda g, p, s: g @ g.T,
    "sign": lambda g, p, s: jnp.sign(g),
    "quotient": lambda g, p, s: 1 / (1 + g),
    "normalized elements": lambda g, p, s: g / (jnp.abs(g) + 1e-8),
    "times parameters": lambda g, p, s: g * p,
    "of parameters": lambda g, p, s: p @ g,
    "update": lambda g, p, s: p - 0.1 * g,
    "beside parameters": lambda g, p, s: jnp.concatenate([g, p])[:SIZE],
    "nothing of it": lambda g, p, s: p + s,
    "or parameters": lambda g, p, s: lax.cond(s[0, 0] > 0, lambda: g, lambda: p),
    "in a scan": lambda g, p, s: lax.scan(lambda c, r: (c, r * r), s[0], g)[1],
    "carried": lambda g, p, s: lax.fori_loop(0, 3, lambda i, c: c * g, jnp.ones_like(g)),
    "in the end": lambda g, p, s: lax.fori_loop(0, 3, lambda i, c: (c[1], c[1] + p), (g, s))[0],
}


def behind(g, p, s, chain):
    for name, function in chain:
        with jax.named_scope(name):
            g = function(g, p, s)
    return lax.psum(g, "data")


@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from(list(KEEPING)), max_size=4),
    breaking=st.none() | st.sampled_from(list(BREAKING)),
    place=st.integers(0, 4),
)
def test_a_gradient_stays_one_through_any_chain_but_not_behind_what_breaks_it(
    names, breaking, place, data_mesh
):
    chain = [(name, KEEPING[name]) for name in names]
    if breaking:
        chain.insert(place, (breaking, BREAKING[breaking]))

    def local(p, s, x, y):
        return behind(grad(p, x, y)["w"], p["w"], s["v"], chain)

    (origin,) = origins(data_mesh, local)
    assert origin == ("other" if breaking else "gradient")


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_gradients_makes_none(name, data_mesh):
    """Of a gradient, which is compressed first, of arguments, and of values of a forward pass."""

    def local(p, s, x, y):
        def with_aux(p):
            return loss(p, x, y), jnp.tanh(p["v"])

        aux = jax.grad(with_aux, has_aux=True)(p)[1]
        kept = functools.partial(behind, p=p["w"], s=s["v"], chain=[(name, KEEPING[name])])
        return kept(grad(p, x, y)["w"]), kept(p["w"]), kept(s["w"]), kept(aux)

    found = origins(data_mesh, local)
    assert found[:3] == ["gradient", "other", "other"]
    assert found[3] in ("forward", "other")


# Sums in a backward pass.


def summed_in_reverse(value):
    """Sum the cotangent of a value over the workers, as packages of parallel layers do."""

    @jax.custom_vjp
    def same(value):
        return value

    same.defvjp(lambda value: (value, None), lambda _, ct: (lax.psum(ct, "data"),))
    return same(value)


FORMS = {
    "as it is": lambda w: w,
    "transposed": lambda w: w.T,
    "a cast": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "a part": lambda w: jnp.concatenate([w[4:], w[:4]]),
    "tiled": lambda w: jnp.tile(w, (1, 2))[:, :SIZE],
    "scaled": lambda w: w / 3,
    "in a checkpoint": lambda w: jax.checkpoint(lambda w: 2 * w)(w),
    "in a jit": lambda w: jax.jit(lambda w: 2 * w)(w),
    "in a loop": lambda w: lax.scan(lambda c, _: (c / 2, None), w, None, length=2)[0],
    "a masked one": lambda w: jnp.where(jnp.arange(SIZE)[:, None] > 3, w, 0.0),
}
ACTIVATIONS = {
    "product": lambda w, x: x @ w,
    "of elements": lambda w, x: jnp.tile(x, (SIZE // len(x), 1)) * w,
    "convolution": lambda w, x: lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0],
    "recurrence": lambda w, x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w + x), x),
    "behind a cast": lambda w, x: (x @ w).astype(jnp.bfloat16).astype(jnp.float32),
    "behind a loop": lambda w, x: lax.scan(lambda c, _: (c / 2, None), x @ w, None, length=2)[0],
    "pooled": lambda w, x: lax.reduce_window(w, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    "inverted": lambda w, x: jnp.linalg.inv(w + 9 * jnp.eye(SIZE)),
    "sent": lambda w, x: lax.ppermute(w, "data", [(0, 1), (1, 0)]),
    "summed again": lambda w, x: lax.psum(w, "data"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_sum_with_which_a_backward_pass_ends_is_of_gradients(name, data_mesh):
    def local(p, s, x, y):
        def synchronized(w):
            return loss({**p, "w": summed_in_reverse(FORMS[name](w))}, x, y)

        return jax.grad(synchronized)(p["w"])

    assert origins(data_mesh, local) == ["gradient"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_sum_with_which_a_backward_pass_goes_on_is_not(name, data_mesh):
    def local(p, s, x, y):
        def parallel(w):
            h = summed_in_reverse(jnp.tile(ACTIVATIONS[name](w, x), (SIZE, 4)))
            return jnp.mean(h**2)

        return jax.grad(parallel)(p["w"])

    sums = large_sums(on_mesh(data_mesh, local))
    assert [e.sum.origin for e in sums if e.sum.shape[1] == 4 * SIZE] == ["backward"]


def test_a_sum_over_another_axis_does_not_go_on(data_mesh):
    """A gradient that is summed over one axis, and then over the other."""
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "local"), types)

    def local(p, s, x, y):
        def whole_loss(p):
            for axis in ("local", "data"):
                p = lax.pcast(p, axis, to="varying")
            return lax.psum(loss(p, x, y), ("data", "local"))

        return jax.grad(whole_loss)(p)

    specs = (P(), P(), P("data"), P("data"))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    report = dq.compress(step, "data").report(*ARGS)
    assert [each.sum.shape for each in report.compressed] == 2 * [(SIZE, SIZE)]


def test_an_average_that_is_a_coefficient_of_a_loss_is_compressed(data_mesh):
    """The backward pass of that loss reads it, as its forward pass does, and does not go on."""

    def local(p, s, x, y):
        direction = lax.pmean(grad(p, x, y), "data")
        product = jax.grad(lambda p: jnp.vdot(grad(p, x, y)["w"], direction["w"]))(p)
        return lax.pmean(product, "data")

    assert set(origins(data_mesh, local)) == {"gradient"}


# Programs inside.


def test_a_function_that_is_called_with_several_things_has_an_origin_for_each(data_mesh):
    """JAX traces it once: its equations are the same objects."""
    mean = jax.jit(lambda tree: lax.pmean(tree, "data"))

    def local(p, s, x, y):
        g = grad(p, x, y)["w"]
        again = lambda c, each: (c, mean(each))  # noqa: E731
        rows = lax.scan(again, 0.0, jnp.stack([g, g]))[1]
        squares = lax.scan(again, 0.0, jnp.stack([g, g]) ** 2)[1]
        return mean(g), mean(g * g), mean(p["w"]), rows, squares

    assert sorted(origins(data_mesh, local)) == ["gradient"] * 2 + ["other"] * 3


def test_a_loop_that_reads_parameters_later_is_seen(data_mesh):
    """The first turn has zeros in their place; the second one has what the first one has summed."""

    def local(p, s, x, y):
        def turn(carry, batch):
            kept, total = carry
            return (p["w"], total + kept + grad(p, *batch)["w"]), lax.psum(kept, "data")

        zeros = jnp.zeros((SIZE, SIZE))
        (_, total), rows = lax.scan(turn, (zeros, zeros), (x[None], y[None]))
        return lax.psum(total, "data"), rows

    assert origins(data_mesh, local) == ["other", "other"]


# Zeros.


def frozen(p, x, y):
    return loss({**p, "v": lax.stop_gradient(p["v"])}, x, y)


def accumulated(p, x, y):
    def add(total, _):
        return jax.tree.map(jnp.add, total, jax.grad(frozen)(p, x, y)), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, p), None, length=2)[0]


ZERO_STEPS = {
    "a mean": lambda p, x, y: lax.pmean(jax.grad(frozen)(p, x, y), "data"),
    "scaled and cast": lambda p, x, y: lax.psum(
        jax.tree.map(lambda g: (0.5 * g.T / 3).astype(jnp.bfloat16), jax.grad(frozen)(p, x, y)),
        "data",
    ),
    "over an integer": lambda p, x, y: lax.psum(
        jax.tree.map(lambda g: g / jnp.asarray(3).astype(jnp.float32), jax.grad(frozen)(p, x, y)),
        "data",
    ),
    "a total of turns": lambda p, x, y: lax.pmean(accumulated(p, x, y), "data"),
    "in each turn": lambda p, x, y: lax.scan(
        lambda c, _: (c, lax.pmean(jax.grad(frozen)(p, x, y), "data")), 0.0, None, length=2
    )[1],
    "in a jit": lambda p, x, y: jax.jit(lambda g: lax.pmean(g, "data"))(jax.grad(frozen)(p, x, y)),
    "scattered": lambda p, x, y: lax.psum_scatter(jax.grad(frozen)(p, x, y), "data", tiled=True),
}


@pytest.mark.parametrize("name", ZERO_STEPS)
@pytest.mark.parametrize("check_vma", [False, True])
def test_zeros_of_frozen_parameters_are_not_sent(name, check_vma, data_mesh):
    def local(p, s, x, y):
        own = lax.pcast(p, "data", to="varying") if check_vma else p
        return ZERO_STEPS[name](own, x, y)

    out = P("data") if name == "scattered" else P()
    step = on_mesh(data_mesh, local, out=out, check_vma=check_vma)
    compressed = dq.compress(step, "data", method="bf16")
    (zeros,) = (each for each in compressed.report(*ARGS).sums if each.why_exact == ZEROS)
    assert zeros.bytes_before > 0 == zeros.bytes_after
    assert len(compressed.report(*ARGS).compressed) == 1
    expected, got = jax.jit(step)(*ARGS), compressed(*ARGS)
    assert not np.any(got["v"])
    assert got["v"].dtype == expected["v"].dtype
    assert dq.vnmse(got, expected) < 1e-4
    text = compressed.lower(*ARGS).compile().as_text()
    trained = lambda p, s, x, y: local(p, s, x, y)["w"]  # noqa: E731
    alone = on_mesh(data_mesh, trained, out=out, check_vma=check_vma)
    alone = dq.compress(alone, "data", method="bf16")
    sent, others = (
        sum(each.sent_bytes(2) for each in collectives(text))
        for text in (text, alone.lower(*ARGS).compile().as_text())
    )
    assert sent == others > 0


@pytest.mark.parametrize(
    "scale", [jnp.inf, jnp.nan, 0.0], ids=["infinity", "no number", "over zero"]
)
def test_zeros_that_may_be_no_zeros_are_sent(scale, data_mesh):
    def local(p, s, x, y):
        g = jax.grad(frozen)(p, x, y)
        return lax.psum(jax.tree.map(lambda g: g * scale if scale else g / 0.0, g), "data")

    step = on_mesh(data_mesh, local)
    got = dq.compress(step, "data", only=every_sum, method="bf16")(*ARGS)
    assert np.all(np.isnan(got["v"]))


def while_false(x):
    return lax.while_loop(
        lambda c: c[0], lambda c: (False, jnp.zeros_like(c[1])), (jnp.max(x) < 0, x)
    )[1]


# Functions of numbers of one worker, whose results are zeros in one of two cases.
PERHAPS_ZEROS = {
    "a loop without turns": lambda x: lax.fori_loop(
        0, jnp.sum(x < 0), lambda i, value: jnp.zeros_like(value), x
    ),
    "a scan of length 0": lambda x: lax.scan(
        lambda value, _: (jnp.zeros_like(value), None), x, None, length=0
    )[0],
    "a while that ends at once": while_false,
    "a gather with ones": lambda x: (
        jnp.zeros(x.shape).at[jnp.int32(2 * x)].get(mode="fill", fill_value=1.0)
    ),
    "zeros over zeros of 16 bits": lambda x: (
        jnp.zeros(x.shape) / jnp.full(x.shape, 1e-8).astype(jnp.float16).astype(jnp.float32)
    ),
    "bits of negative zeros": lambda x: lax.bitcast_convert_type(
        -jnp.zeros(x.shape), jnp.int32
    ).astype(jnp.float32),
    "a gather with no numbers": lambda x: jnp.take(jnp.zeros(x.shape), jnp.int32(3e4 * x)),
}


@pytest.mark.parametrize("name", PERHAPS_ZEROS)
def test_what_may_be_no_zeros_is_summed(name, data_mesh):
    def local(p, s, x, y):
        others = 1 + jnp.float32(lax.axis_index("data")) + jnp.arange(4.0)
        return lax.pmean(jax.grad(loss)(p, x, y), "data"), lax.psum(
            PERHAPS_ZEROS[name](others), "data"
        )

    step = on_mesh(data_mesh, local)
    (_, expected), (_, got) = jax.jit(step)(*ARGS), dq.compress(step, "data")(*ARGS)
    np.testing.assert_array_equal(got, expected)
    assert np.all(expected != 0)


def test_the_condition_of_a_loop_has_the_values_that_its_body_returns(data_mesh):
    def local(p, s, x, y):
        gradient = lax.pmean(jax.grad(loss)(p, x, y), "data")
        turns, _ = lax.while_loop(
            lambda c: (lax.psum(c[1], "data") < 6) & (c[0] < 9),
            lambda c: (c[0] + 1, c[1] + 1),
            (0, 0.0),
        )
        return gradient, turns

    step = on_mesh(data_mesh, local)
    assert dq.compress(step, "data")(*ARGS)[1] == jax.jit(step)(*ARGS)[1] == 3


def test_a_contraction_of_a_sum_goes_on(data_mesh):
    """A mean over rows that each row loses again: its gradient is part of that of a table."""
    mesh = data_mesh(2)
    table, rows = jnp.ones((SIZE, 64)), jnp.arange(32 * 16).reshape(32, 16) % SIZE

    def centered(table, rows):
        h = table[rows]
        return jnp.sum(jnp.sin(h - h.mean(0, keepdims=True)) ** 2)

    args = (
        jax.device_put(table, NamedSharding(mesh, P())),
        jax.device_put(rows, NamedSharding(mesh, P("data"))),
    )
    report = dq.compress(jax.jit(jax.grad(centered)), "data").report(*args)
    assert [each.sum.shape for each in report.compressed] == [table.shape]
    (mean,) = (e for e in report.sums if e.sum.shape == (16, 64) and e.sum.origin == "backward")
    assert mean.why_exact == "a backward pass goes on with its result"


def test_a_step_of_zeros_alone_has_nothing_to_compress(data_mesh):
    def local(p, s, x, y):
        return lax.pmean(jax.grad(frozen)(p, x, y)["v"], "data")

    with pytest.raises(ValueError, match=ZEROS):
        dq.compress(on_mesh(data_mesh, local), "data")(*ARGS)


def test_the_error_for_gradients_that_are_arguments_has_a_remedy(data_mesh):
    """A step in two functions: one computes gradients, and the other one averages them."""
    average = jax.shard_map(
        lambda g: lax.pmean(g, "data"), mesh=data_mesh(2), in_specs=P("data"), out_specs=P()
    )
    g = jnp.concatenate([PARAMS["w"], PARAMS["v"]])
    with pytest.raises(ValueError, match=r"(?s)from no backward pass.*only=lambda s: s\.origin"):
        dq.compress(average, "data")(g)
    compressed = dq.compress(average, "data", method="bf16", only=lambda s: s.origin == "other")
    assert 1e-8 < dq.vnmse(compressed(g), average(g)) < 1e-4
