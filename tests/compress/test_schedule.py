"""Order and number of collectives of compressed steps, as the compiled program has them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, loss_fn, mapped, mean_loss, own_gradient
from tests.support.hlo import collectives, unordered

METHOD = "bf16"


def key_of(*args):
    return jax.random.key(0)


def text_of(step, *args):
    return jax.jit(step).lower(*args).compile().as_text()


def found_in(step, *args, **options):
    options = {"key": key_of, "method": METHOD} | options
    return collectives(text_of(dq.compress(step, "data", **options), *args))


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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("check_vma", [False, True])
def test_other_messages_of_a_step_wait_for_its_compressed_sums(name, check_vma, data_mesh):
    """And compressed sums, loops on four workers, wait for them: none needs another one."""

    def step(params, x, y):
        own = lax.pcast(params, "data", to="varying") if check_vma else params
        grads = jax.grad(loss_fn)(own, x, y)
        before = OTHERS[name](x)
        first = lax.pmean(grads["w"], "data")
        part = lax.psum_scatter(grads["v"], "data", tiled=True)  # a second group
        shift = jnp.sum(first) * 1e-9
        after = OTHERS[name](y + shift)  # behind the first group, as the third one is
        third = lax.pmean(grads["v"] + shift, "data")
        return first, part, third, before[None], after[None]

    out = (P(), P("data"), P(), P("data"), P("data"))
    whole = mapped(step, data_mesh(4), out=out, check_vma=check_vma)
    compressed = dq.compress(whole, "data", method=METHOD)
    assert compressed.report(PARAMS, X, Y).num_groups == 3
    assert unordered(text_of(compressed, PARAMS, X, Y)) == []
    for got, wanted in zip(
        compressed(PARAMS, X, Y)[3:], jax.jit(whole)(PARAMS, X, Y)[3:], strict=True
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


def test_buckets_of_rows_are_sent_as_the_backward_pass_makes_them(data_mesh, monkeypatch):
    """More than ten, of which each is a bucket."""
    layers, sizes = [jnp.full((64, 64 + 2 * i), 0.01) for i in range(12)], []

    def loss(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)[:, :64] + x
        return jnp.mean(x**2)

    def all_reduce(self, flat, call, key, state):
        sizes.append(flat.size)
        return all_reduce_of(self, flat, call, key, state)

    all_reduce_of = dq.methods.BF16.all_reduce
    monkeypatch.setattr(dq.methods.BF16, "all_reduce", all_reduce)
    shardings = [jax.NamedSharding(data_mesh(2), spec) for spec in (P(), P("data"))]
    args = jax.device_put((layers, jnp.ones((8, 64))), tuple(shardings))
    options = dq.Compression(bucket_bytes=4 * layers[-1].size, bucketing="in_order")
    step = dq.compress(
        jax.jit(jax.grad(loss)), "data", method=dataclasses.replace(options, method="bf16")
    )
    step.trace(*args)
    assert sizes == [leaf.size for leaf in reversed(layers)]
