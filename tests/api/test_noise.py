"""Rounding noise of repeated reductions of the same values, for every way to get a key."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import islands
from tests.support.hlo import collectives
from tests.support.states import on_mesh
from tests.support.workers import STOCHASTIC, mapped

WORKERS = 4
REPEATS = 4
SHAPE = (64, 128)
Means = Callable[[Mesh, jax.Array], list[jax.Array]]

METHOD = STOCHASTIC  # the noise of a key, whatever the method


def keys() -> list[jax.Array]:
    return [jax.random.key(number) for number in range(REPEATS)]


def inside(function: Callable[..., jax.Array], out_spec: P = P(), *, keyless=False) -> Means:
    """`function(values of a worker, key)` inside `shard_map`, with a key for each call. Without
    keys, the samples of the values differ from call to call: they are multiples by powers of two,
    which are rounded alike.
    """

    def means(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=(P("data"), P()), out_specs=out_spec)
        def mapped(rows: jax.Array, key: jax.Array) -> jax.Array:
            return function(rows[0], None if keyless else key)

        scales = [2.0**number if keyless else 1.0 for number in range(REPEATS)]
        return [mapped(rows * s, key) / s for s, key in zip(scales, keys(), strict=True)]

    return means


def mean(x: jax.Array, key: jax.Array | None) -> jax.Array:
    return dq.pmean(x, "data", METHOD, key=key)


def scattered(x: jax.Array, key: jax.Array | None) -> jax.Array:
    return dq.psum_scatter(x, "data", METHOD, key=key, tiled=True) / WORKERS


def gathered(part: jax.Array, key: jax.Array | None) -> jax.Array:
    whole = dq.all_gather(part, "data", key=key, to="invarying", method=METHOD)
    return jnp.mean(whole, axis=0)


def by_steps(mesh: Mesh, rows: jax.Array) -> list[jax.Array]:
    init, update = on_mesh(dq.all_reduce_gradients("data", method=METHOD), mesh)
    state, means = init(rows[0]), []
    for _ in range(REPEATS):
        mean, state = update(rows, state)
        means.append(mean)
    return means


WAYS: dict[str, Means] = {
    "pmean": inside(mean),
    "psum": inside(lambda x, key: dq.psum(x, "data", key=key, method=METHOD) / WORKERS),
    "psum_scatter": inside(scattered, P("data")),
    "all_gather": inside(gathered),
    "all_reduce_gradients": by_steps,
    "pmean without a key": inside(mean, keyless=True),
    "psum_scatter without a key": inside(scattered, P("data"), keyless=True),
    "all_gather without a key": inside(gathered, keyless=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_noise_of_repeated_reductions_averages_out(
    way: str, data_mesh: Callable[[int], Mesh]
) -> None:
    mesh = data_mesh(WORKERS)
    rows = jax.random.normal(jax.random.key(1), (WORKERS, *SHAPE))
    exact = jnp.mean(rows, axis=0)
    one = dq.vnmse(WAYS["pmean"](mesh, rows)[0], exact)
    if way.startswith("all_gather"):  # of four parts, not of their sum
        one = dq.vnmse(WAYS[way](mesh, rows)[0], exact)
    of_all = dq.vnmse(jnp.mean(jnp.stack(WAYS[way](mesh, rows)), axis=0), exact)
    assert 0.5 * one / REPEATS < of_all < 1.7 * one / REPEATS


def test_without_a_key_equal_terms_have_equal_bits_and_four_bytes_more_are_sent(
    data_mesh: Callable[[int], Mesh],
) -> None:
    """A change of one value of one worker changes the noise of all."""
    rows = jax.random.normal(jax.random.key(1), (WORKERS, *SHAPE))

    def compiled_with(key: jax.Array | None) -> jax.stages.Compiled:
        program = mapped(lambda rows: mean(rows, key), data_mesh(WORKERS), check_vma=False)
        return jax.jit(program).lower(rows).compile()

    compiled = compiled_with(None)
    first, again = (np.asarray(compiled(rows)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, np.tile(first[:1], (WORKERS, 1, 1)))
    changed = np.asarray(compiled(rows.at[2, 0, 0].add(1e-3)))
    assert np.mean(changed != first) > 0.1
    without, with_key = (
        sum(each.sent_bytes(WORKERS) for each in collectives(program.as_text()))
        for program in (compiled, compiled_with(jax.random.key(0)))
    )
    assert without - with_key == 4 * 2 * (WORKERS - 1) / WORKERS


def test_without_a_key_buckets_in_order_wait_for_no_gradient_of_another_one(
    data_mesh: Callable[[int], Mesh],
) -> None:
    """Their noise follows from their own leaves, so that each can leave under a backward pass."""
    rows = {n: jax.random.normal(jax.random.key(i), (WORKERS, *SHAPE)) for i, n in enumerate("ab")}
    changed = rows | {"b": rows["b"] + 1}

    def means(bucketing: str, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        bucket_bytes = 4 * SHAPE[0] * SHAPE[1]
        choice = dq.Compression(METHOD, bucket_bytes=bucket_bytes, bucketing=bucketing)
        mean = functools.partial(dq.pmean, axis_name="data", method=choice)
        return jax.jit(mapped(mean, data_mesh(WORKERS), check_vma=False))(rows)

    first, second = (means("in_order", each) for each in (rows, changed))
    np.testing.assert_array_equal(first["a"], second["a"])
    together, others = (means("striped", each) for each in (rows, changed))
    assert np.mean(np.asarray(together["a"] != others["a"])) > 0.1


def test_messages_without_a_key_have_noise_of_their_own() -> None:
    values = jax.random.normal(jax.random.key(1), SHAPE)
    message = islands.encode({"w": values}, method="dynamiq:4")
    assert message.to_bytes() == islands.encode({"w": values}, method="dynamiq:4").to_bytes()
    decoded = [
        islands.decode(islands.encode({"w": values * 2.0**n}, method="dynamiq:4"))["w"] / 2.0**n
        for n in range(REPEATS)
    ]
    one, of_all = dq.vnmse(decoded[0], values), dq.vnmse(jnp.mean(jnp.stack(decoded), 0), values)
    assert 0.5 * one / REPEATS < of_all < 1.7 * one / REPEATS
