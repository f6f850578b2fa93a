"""Metrics `sharing_gain` and `idle_bucket`: what buckets would gain from sharing their bits."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax._collectives.error_estimate import Estimate
from dynamiq_jax._collectives.sharing import gain_of_sharing
from tests.support.gradients import heavy_tailed
from tests.support.workers import simulated

LEAST = 2.375


def gain_of(errors, rows, bits, scales=None):
    """Return the gain and the idle bucket, of squared errors in units of squared scales."""
    scales = scales or [1.0] * len(errors)
    one, zero = np.float32(1), np.float32(0)
    found = [
        Estimate(np.float32(e), one, np.float32(s), zero, np.float32(r), zero)
        for e, r, s in zip(errors, rows, scales, strict=True)
    ]
    buckets = [
        types.SimpleNamespace(method=dq.DynamiQ(bits=b) if b else dq.methods.BF16(), size=256 * r)
        for b, r in zip(bits, rows, strict=True)
    ]
    gain, idle = jax.jit(functools.partial(gain_of_sharing, buckets))(found)
    assert gain.dtype == idle.dtype == jnp.float32 and gain.shape == idle.shape == ()
    return float(gain), int(idle)


def searched(errors, rows, bits):
    """Return the least error of buckets that share their bits, by a search for the level."""
    errors, rows, spare = np.array(errors), np.array(rows), np.array(bits) - LEAST
    last = errors * 4**spare / rows

    def taken(level):
        return np.sum(rows * np.log2(np.minimum(level, last) * rows / errors)) / 2

    low, high = 1e-30, 1e30
    for _ in range(300):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if taken(middle) < 0 else (low, middle)
    return np.sum(rows * np.minimum(low, last))


@given(
    st.lists(
        st.tuples(st.floats(1e-8, 1.0), st.integers(1, 1000), st.sampled_from([LEAST, 3, 5, 8.0])),
        min_size=2,
        max_size=6,
    )
)
def test_the_gain_is_that_of_the_best_budgets(buckets):
    errors, rows, bits = zip(*buckets, strict=True)
    gain, idle = gain_of(errors, rows, bits)
    assert gain == pytest.approx(sum(errors) / searched(errors, rows, bits), rel=1e-3)
    assert gain > 1 - 1e-4
    if gain > 1.001:
        assert bits[idle] > LEAST


def test_equal_errors_of_coordinates_leave_nothing_to_share():
    assert gain_of([1e-3, 2e-3, 5e-3], [10, 20, 50], [5, 5, 5])[0] == pytest.approx(1)


def test_a_tiny_bucket_cannot_give_more_bits_than_it_has():
    gain, idle = gain_of([1e-20, 1.0], [1, 99], [5, 5])
    assert idle == 0
    assert gain == pytest.approx(4 ** ((5 - LEAST) / 99), rel=1e-3)


def test_units_and_buckets_without_error_or_bits_do_not_count():
    """Errors are in units of squared scales. Others are not DynamiQ, or zero, or sent exactly."""
    plain = gain_of([1e-3, 1e-6], [4, 4], [5, 5])
    assert plain == (pytest.approx(500.5 / np.sqrt(1000), rel=1e-3), 1)
    assert gain_of([1e-3, 1e-3], [4, 4], [5, 5], [1e-20, 1e-20 / 1000**0.5])[0] == pytest.approx(
        plain[0], rel=1e-3
    )
    more = gain_of([1e-3, 0.0, 1e-9, 1e-6], [4, 9, 9, 4], [5, 5, None, 5])
    assert more == (pytest.approx(plain[0], rel=1e-3), 3)
    assert gain_of([1e-3, 0.0], [4, 4], [5, 5])[0] == 1
    assert gain_of([0.0, 0.0], [4, 4], [5, 5])[0] == 1
    assert gain_of([1e-3], [4], [5]) == (1, 0)


SCALES = {"a": 1e-3, "b": 1.0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("bucket_bytes", "least", "most"), [(2**15, 3, 1e6), (2**16, 1, 1)])
def test_an_all_reduce_has_the_gain_among_its_metrics(bucket_bytes, least, most):
    """A bucket of two leaves shares their bits already."""
    tree = {
        name: np.stack([heavy_tailed(n, (8192,), spread=0, scale=scale) for n in range(4)])
        for name, scale in SCALES.items()
    }
    options = dq.Compression(bucket_bytes=bucket_bytes, bucketing="in_order")

    def local(key, tree):
        return dq.pmean(tree, "data", key=key, method=options, with_metrics=True)[1]

    metrics = simulated(local)(jax.random.key(0), tree)
    assert least <= float(metrics["sharing_gain"][0]) <= most
    assert int(metrics["idle_bucket"][0]) == 0
