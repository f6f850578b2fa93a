"""Norms over the whole range of float32, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import operations
from pallas_kernels.codec import l2_norm, rows

pytestmark = pytest.mark.optimized

TINY, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max

# The base has a faster formula for usual values, and switches to the careful one by the block.
functions = pytest.mark.parametrize(
    "norms",
    (jax.jit(functools.partial(l2_norm, axis=1)), jax.jit(operations.by("xla").statistics)),
    ids=("l2_norm", "statistics"),
)


def assert_norms(found, values: np.ndarray) -> None:
    exact = np.linalg.norm(values.astype(np.float64), axis=1)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    edge = np.abs(exact / LARGEST - 1) < 1e-5  # may round to either side
    np.testing.assert_allclose(np.asarray(found)[~edge], expected[~edge], rtol=1e-5)


@functions
@given(exponent=st.floats(-126, 127.9), seed=st.integers(0, 2**32 - 1))
def test_the_norm_is_that_of_float64(norms, exponent, seed):
    values = np.random.default_rng(seed).uniform(-1, 1, (13, 256))
    values = (values * 2.0**exponent).astype(np.float32)
    values[np.abs(values) < TINY] = 0  # subnormal numbers are flushed
    assert_norms(norms(values), values)


@functions
def test_rows_of_very_different_norms_are_all_precise(norms):
    """The formula for usual values would lose some of them, and a unit for all rows nearly all."""
    values = np.random.default_rng(0).uniform(-1, 1, (13, 256)).astype(np.float32)
    values *= np.float32(10.0) ** np.arange(-36, 37, 6, dtype=np.float32)[:, None]
    assert_norms(norms(values), values)


@functions
def test_a_norm_of_what_is_not_finite_is_not_and_that_of_zeros_is_zero(norms):
    values = np.ones((13, 256), np.float32)
    values[1:4, 7] = np.nan, np.inf, -np.inf
    values[4] = 0
    found = np.asarray(norms(values))
    np.testing.assert_array_equal(np.isfinite(found), ~np.isin(np.arange(13), (1, 2, 3)))
    assert found[4] == 0


def test_no_factor_is_subnormal(monkeypatch):
    """Hardware may flush subnormal factors to zero, and the norm with them. A CPU does not."""
    factor = rows.inverse_unit

    def flushed(unit):
        found = factor(unit)
        return jnp.where(found < TINY, np.float32(0), found)

    monkeypatch.setattr(rows, "inverse_unit", flushed)
    values = np.zeros((4, 256), np.float32)
    values[:, 5] = 2.0**125, 2.0**126, 2.0**127, LARGEST
    norms = jax.jit(functools.partial(l2_norm, axis=1))(values)
    np.testing.assert_allclose(norms, values[:, 5], rtol=1e-6)
