"""Norms over the whole range of float32, against float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.codec.norms import l2_norm


@given(exponent=st.floats(-126, 127.9), seed=st.integers(0, 2**32 - 1))
def test_the_norm_is_that_of_float64(exponent, seed):
    values = np.random.default_rng(seed).uniform(-1, 1, (5, 256))
    values = (values * 2.0**exponent).astype(np.float32)
    values[np.abs(values) < 2.0**-126] = 0  # subnormal numbers are flushed
    exact = np.linalg.norm(values.astype(np.float64), axis=1)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    found = np.asarray(l2_norm(values, axis=1))
    edge = np.abs(exact / np.finfo(np.float32).max - 1) < 1e-5  # may round to either side
    np.testing.assert_allclose(found[~edge], expected[~edge], rtol=1e-5)


@pytest.mark.parametrize("wrong", (np.nan, np.inf, -np.inf))
def test_a_norm_of_what_is_not_finite_is_not(wrong):
    values = np.ones((2, 256), np.float32)
    values[1, 7] = wrong
    np.testing.assert_array_equal(np.isfinite(l2_norm(values, axis=1)), [True, False])


def test_the_norm_of_zeros_is_zero():
    np.testing.assert_array_equal(l2_norm(np.zeros((2, 256), np.float32), axis=1), 0)
