"""vNMSE: relative, additive over leaves, and defined at every magnitude."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from tests.support.gradients import heavy_tailed, vnmse

TRUTH = {"w": heavy_tailed(0, (512,)), "b": heavy_tailed(1, (40,))}


def perturbed(size: float):
    return {
        name: leaf + np.float32(size) * heavy_tailed(7, leaf.shape) for name, leaf in TRUTH.items()
    }


@pytest.mark.parametrize("size", (1e-2, 1.0, 100.0))
def test_it_is_the_error_of_all_leaves_together(size):
    flat = [np.concatenate([tree["w"], tree["b"]]) for tree in (perturbed(size), TRUTH)]
    assert float(dq.vnmse(perturbed(size), TRUTH)) == pytest.approx(vnmse(*flat), rel=1e-4)


@given(power=st.integers(-90, 120))
def test_scale_does_not_matter(power):
    estimate, truth = ({"w": np.ldexp(tree["w"], power)} for tree in (perturbed(0.1), TRUTH))
    expected = float(dq.vnmse({"w": perturbed(0.1)["w"]}, {"w": TRUTH["w"]}))
    assert float(dq.vnmse(estimate, truth)) == pytest.approx(expected, rel=1e-5)
    assert expected > 0


@pytest.mark.parametrize("truth", (8e37, 2e38, 3.4e38))
def test_reciprocals_that_hardware_flushes_are_not_needed(truth):
    truth = jnp.full(3, truth, jnp.float32)
    assert float(dq.vnmse(truth / 2, truth)) == pytest.approx(0.25, rel=1e-6)


def test_the_ends_of_the_scale():
    zero, one = jnp.zeros(3), jnp.ones(3)
    assert float(dq.vnmse(one, one)) == 0
    assert float(dq.vnmse(zero, one)) == 1
    assert float(dq.vnmse(zero, zero)) == 0
    assert float(dq.vnmse(one, zero)) == np.inf
    assert float(dq.vnmse(jnp.full(3, 1e-25), zero)) == np.inf
    assert float(dq.vnmse(jnp.full(3, 3e38), jnp.full(3, -3e38))) == pytest.approx(4)
    assert np.isnan(float(dq.vnmse(jnp.array([jnp.nan, 1, 1]), zero)))
    assert np.isnan(float(dq.vnmse(jnp.array([1.0, jnp.nan]), jnp.ones(2))))


def test_complex_numbers_count_with_both_parts():
    estimate, truth = jnp.array([1 + 1j, 2 + 2j]), jnp.array([1 - 1j, 2 + 1j])
    # Errors of 2j and 1j, of numbers whose squared magnitudes are 2 and 5.
    assert float(dq.vnmse(estimate, truth)) == pytest.approx(5 / 7, rel=1e-6)
    assert float(dq.vnmse(truth.conj(), truth)) == pytest.approx((4 + 4) / 7, rel=1e-6)
    mixed = {"real": jnp.array([3.0]), "complex": truth}
    assert float(dq.vnmse({**mixed, "complex": estimate}, mixed)) == pytest.approx(5 / 16, rel=1e-6)
    beside_real = [jnp.array([1.0, 2.0]), jnp.array([1j, 2])]
    for pair in (beside_real, beside_real[::-1]):
        assert float(dq.vnmse(*pair)) == pytest.approx(2 / 5)


def test_shapes_that_differ_are_refused():
    with pytest.raises(
        ValueError, match=r"estimate has shapes \[\(2,\)\] and truth has \[\(3,\)\]"
    ):
        dq.vnmse(jnp.ones(2), jnp.ones(3))


def test_low_precision_is_measured_in_single():
    exact = heavy_tailed(0, (4096,))
    rounded = jnp.asarray(exact).astype(jnp.bfloat16)
    error = float(dq.vnmse(rounded, jnp.asarray(exact)))
    # Rounding to 8 bits of mantissa: uniform in half a unit in the last place.
    assert 1e-7 < error < 2.0**-16
