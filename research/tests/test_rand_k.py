"""Rand-K: the places that are drawn, the error of their sum, and its expectation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import ErrorFeedback, Exact
from dynamiq_jax.topologies import Ring
from dynamiq_research import RandK, TopKChunked
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import compiled_collectives, sent_bytes
from tests.support.workers import call_on, simulated

WORKERS, SIZE = 4, 3000
EIGHTH = RandK(bits=4.0, inner=Exact())  # of the coordinates


def reduced(method: RandK, values: np.ndarray, keys: int = 1, **options):
    """Return sums and applied values, [keys, workers, size]."""
    call = call_on(values.shape[1], WORKERS, feedback=True, **options)

    def local(key, values):
        def one(key):
            found = method.all_reduce(values, call, key, ())
            return found.total, found.applied

        return jax.lax.map(one, jax.random.split(key, keys))

    total, applied = map(np.asarray, simulated(local)(jax.random.key(3), values))
    for replica in total:
        np.testing.assert_array_equal(replica, total[0])
    return total[0], applied.swapaxes(0, 1)


@pytest.mark.parametrize("topology", ("ring", "butterfly", "all_to_all"))
def test_a_sum_has_k_coordinates_of_the_exact_one(topology):
    values = of_workers(0, WORKERS, SIZE)
    total, applied = reduced(EIGHTH, values, 2, topology=topology)
    count = EIGHTH.num_chosen(call_on(SIZE, WORKERS))
    assert SIZE // 8 - WORKERS < count <= SIZE // 8
    exact = values.sum(axis=0, dtype=np.float64)
    for one, own in zip(total, applied, strict=True):
        drawn = one != 0
        assert drawn.sum() == count
        np.testing.assert_allclose(one[drawn], exact[drawn], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(own, np.where(drawn, values, 0))
    assert np.any((total[0] != 0) != (total[1] != 0))


@pytest.mark.parametrize("size", (1, 2, 17, 3000))
def test_a_sum_of_all_coordinates_is_exact(size):
    values = of_workers(1, WORKERS, size)
    full = RandK(bits=32.0, inner=Exact())
    total, applied = reduced(full, values)
    count = full.num_chosen(call_on(size, WORKERS))
    assert count == size or size % WORKERS  # chunks of equal size may cost more than the budget
    if count == size:
        np.testing.assert_allclose(total[0], values.sum(axis=0), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(applied[0], values)


def test_every_place_is_drawn_as_often_and_pairs_are_independent(keys=4000, size=64):
    """In place k, a share of k / size of the draws, and of pairs that of draws without return."""
    total, _ = reduced(EIGHTH, np.ones((WORKERS, size), np.float32), keys)
    drawn = total != 0
    count = EIGHTH.num_chosen(call_on(size, WORKERS))
    share = count / size
    spread = math.sqrt(share * (1 - share) / keys)
    assert np.all(np.abs(drawn.mean(axis=0) - share) < 5 * spread)
    both = share * (count - 1) / (size - 1)
    spread = math.sqrt(both * (1 - both) / keys)
    for lag in (1, 2, 32):
        pairs = (drawn & np.roll(drawn, lag, axis=1)).mean(axis=0)
        assert np.all(np.abs(pairs - both) < 5 * spread)


def test_a_weight_makes_the_sum_unbiased(keys=600):
    """Within five sigma at every coordinate, and with the variance of the law."""
    values = worker_gradients(WORKERS, 512, 2, octaves=0.0)
    method = RandK(bits=4.0, inner=Exact(), unbiased=True)
    total, applied = reduced(method, values, keys)
    truth = values.sum(axis=0, dtype=np.float64)
    ratio = 512 / method.num_chosen(call_on(512, WORKERS))
    spread = np.abs(truth) * math.sqrt((ratio - 1) / keys)
    assert np.all(np.abs(total.mean(axis=0, dtype=np.float64) - truth) < 5 * spread + 1e-6)
    mean = np.mean([vnmse(one, truth) for one in total])
    assert mean == pytest.approx(ratio - 1, rel=0.05)
    np.testing.assert_allclose(applied.sum(axis=1), total, rtol=1e-4, atol=1e-4)


def test_without_the_weight_the_error_is_the_share_that_is_left_out(keys=200):
    values = worker_gradients(WORKERS, SIZE, 2, octaves=0.0)
    truth = values.sum(axis=0, dtype=np.float64)
    total, _ = reduced(EIGHTH, values, keys)
    assert np.mean([vnmse(one, truth) for one in total]) == pytest.approx(7 / 8, rel=0.01)


@pytest.mark.slow
def test_nan_is_not_hidden_where_it_is_not_drawn():
    values = of_workers(0, WORKERS, SIZE)
    total, _ = reduced(EIGHTH, values)
    (left_out,) = np.nonzero(total[0] == 0)
    for bad in (np.nan, np.inf):
        values[2, left_out[0]] = bad
        assert np.isnan(reduced(EIGHTH, values)[0]).all()


def test_an_overflow_at_some_places_stays_there():
    values = np.full((WORKERS, SIZE), 1.0, np.float32)
    values[:, ::2] = 2e38
    total = reduced(EIGHTH, values)[0][0]
    assert np.isinf(total).any() and (total == WORKERS).any() and (total == 0).any()


def test_feedback_sums_all_coordinates_in_time(steps=100):
    """Over steps, the applied values and the residual add up to the gradients."""
    values = of_workers(4, WORKERS, 512)
    method, call = ErrorFeedback(inner=EIGHTH), call_on(512, WORKERS)

    def local(key, values):
        def step(state, key):
            found = method.all_reduce(values, call, key, state)
            return found.state, found.total

        keys = jax.random.split(key, steps)
        state, totals = jax.lax.scan(step, method.init_state(call), keys)
        return totals.sum(axis=0), state.residual

    totals, residual = map(np.asarray, simulated(local)(jax.random.key(0), values))
    wanted = steps * values.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(totals[0] + residual.sum(axis=0), wanted, rtol=1e-3, atol=1e-2)
    assert vnmse(totals[0], wanted) < 0.05


@settings(deadline=None)
@given(bits=st.floats(0.1, 32), size=st.integers(1, 10**6), workers=st.integers(2, 64))
def test_the_wire_keeps_within_the_budget(bits, size, workers):
    """The next coordinate would be above it, or there is only one."""
    call, method = call_on(size, workers), RandK(bits=bits)
    count = method.num_chosen(call)
    allowed = bits / 8 * size * 2 * (workers - 1) / workers

    def sent(count):
        return Ring().bytes_sent(method.inner.wire_cost(call.of_size(count)), workers)

    assert 1 <= count <= size
    assert sent(count) <= allowed or count == 1
    assert count == size or sent(count + 1) > allowed


def test_the_compiled_program_sends_values_and_a_hash_of_keys(data_mesh):
    tree = {"w": jax.ShapeDtypeStruct((300, 101), jnp.float32)}
    method = ErrorFeedback(inner=RandK(inner=Exact()))
    report = dq.wire_report(tree, 4, method=method)
    assert sent_bytes(data_mesh(4), tree, method, "ring") == report.bytes_per_worker
    found = compiled_collectives(data_mesh(4), tree, RandK())
    assert {dtype for one in found for dtype in one.dtypes} == {"u16", "u32"}
    assert sum(one.sent_bytes(4) for one in found if "u32" in one.dtypes) == 3 * 4


@pytest.mark.parametrize(
    ("options", "says"),
    (
        ({"bits": 0}, r"bits=0 is out of range\. Give more than 0, and at most 32"),
        ({"bits": 33.0}, r"bits=33\.0"),
        ({"bits": math.nan}, "bits=nan"),
        ({"bits": True}, "bits=True"),
        ({"unbiased": 1}, "unbiased=1"),
        ({"inner": TopKChunked()}, r"inner=TopKChunked.*cannot sum the values.*dq\.methods\.BF16"),
    ),
)
def test_fields_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        RandK(**options)
