"""Rounding noise of compressed steps: another one for each sum, step and turn of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._run import driver
from dynamiq_jax._run.sample import fold_in_sample
from tests.compress.forms import every_sum, normal
from tests.support.workers import STOCHASTIC

WORKERS = 4
REPEATS = 8
ROWS = normal(WORKERS, 64, 64, seed=1)


def step_of(data_mesh, local, **options):
    mapped = jax.shard_map(local, mesh=data_mesh(WORKERS), in_specs=(P("data"), P()), out_specs=P())
    return jax.jit(dq.compress(mapped, "data", method=STOCHASTIC, only=every_sum, **options))


def mean(rows, number):
    """A step that depends on its number only by a value that is too small to matter."""
    return lax.pmean(rows[0] * (1 + number * 2.0**-22), "data")


def error(means):
    return float(dq.vnmse(sum(means) / len(means), jnp.mean(ROWS, 0)))


@pytest.mark.parametrize("key", [None, lambda rows, number: jax.random.key(jnp.int32(number))])
def test_errors_of_steps_cancel(data_mesh, key):
    step = step_of(data_mesh, mean, key=key)
    means = [step(ROWS, jnp.float32(number)) for number in range(REPEATS)]
    alone = np.mean([error([each]) for each in means])
    assert alone > 0
    assert 0.5 * alone / REPEATS < error(means) < 2 * alone / REPEATS


def test_a_step_that_repeats_itself_repeats_its_noise(data_mesh):
    step = step_of(data_mesh, mean)
    first, again = step(ROWS, jnp.float32(0)), step(ROWS, jnp.float32(0))
    np.testing.assert_array_equal(first, again)
    assert jnp.any(first != step(ROWS, jnp.float32(1)))


def test_errors_of_sums_of_one_step_cancel(data_mesh):
    """The second group needs the first one."""

    def local(rows, number):
        first = lax.pmean(rows[0], "data")
        same = rows[0] + 0 * lax.pcast(first, "data", to="varying")
        return first, lax.pmean(same, "data")

    for key in (None, lambda rows, number: jax.random.key(0)):
        first, second = step_of(data_mesh, local, key=key)(ROWS, jnp.float32(0))
        assert error([first, second]) < 0.75 * error([first])


def test_errors_of_turns_of_a_loop_cancel_whatever_the_key(data_mesh):
    def local(rows, number):
        def turn(total, shift):
            return total + lax.pmean(rows[0] * (1 + shift * 2.0**-22), "data"), None

        start = jnp.ones(ROWS.shape[1:])  # from zeros, the sums would leave the loop as one
        return lax.scan(turn, start, jnp.arange(REPEATS, dtype=jnp.float32))[0] - 1

    for key in (None, lambda rows, number: jax.random.key(0)):
        total = step_of(data_mesh, local, key=key)(ROWS, jnp.float32(0))
        alone = error([step_of(data_mesh, mean, key=key)(ROWS, jnp.float32(0))])
        assert error([total / REPEATS]) < 2 * alone / REPEATS


@pytest.mark.parametrize("key", [None, lambda rows, number: jax.random.key(3)])
def test_all_workers_have_one_key(key, data_mesh, monkeypatch):
    """In a loop, where a given key is changed too: methods share random choices by their keys."""

    def word_of(plan, leaves, key, states, token, sampled_over):
        if sampled_over is not None:
            key = fold_in_sample(key, [*leaves.values()], sampled_over, token)
        word = jax.random.bits(key, dtype=jnp.uint16).astype(jnp.float32)
        return {i: jnp.full_like(leaf, word) for i, leaf in leaves.items()}, (), {}, token

    monkeypatch.setattr(driver, "send_all", word_of)

    def local(rows, number):
        def turn(carry, shift):
            return carry, lax.psum(rows[0] + shift, "data")[:1, 0] + 0 * carry

        words = lax.scan(turn, number, jnp.arange(3, dtype=jnp.float32))[1]
        return jnp.concatenate([words[:, 0], lax.psum(rows[0], "data")[:1, 0]])[None]

    mapped = jax.shard_map(
        local,
        mesh=data_mesh(WORKERS),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    words = dq.compress(mapped, "data", key=key, only=every_sum)(ROWS, jnp.float32(0))
    assert words.shape == (WORKERS, 4)
    np.testing.assert_array_equal(words, jnp.tile(words[:1], (WORKERS, 1)))
    assert len({*map(float, words[0])}) == 4  # each turn and each sum has its own
