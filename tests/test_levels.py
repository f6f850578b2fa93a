"""Levels are geometric, and rounding between them is monotone and unbiased in the value."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax.codec import levels, packing
from dynamiq_jax.methods.dynamiq import NONUNIFORMITY

WIDTHS = tuple(width for width in packing.WIDTHS if width)
PRECISION = 2.0**-21  # of f, promised by the wire format

tuned = pytest.mark.parametrize("width", WIDTHS)


_level = jax.jit(levels.level)
_round_to_level = jax.jit(levels.round_to_level)


def level(magnitude, width, e):
    return _level(magnitude, levels.make_levels(width, e))


def round_to_level(t, offset, width, e):
    return _round_to_level(t, offset, levels.make_levels(width, e))


def all_levels(width: int, e: float) -> np.ndarray:
    codes = np.arange(levels.num_levels(width) + 1, dtype=np.float32)
    return np.asarray(level(codes, width, e), np.float64)


def relative_error(width: int, e: float) -> float:
    expected = oracle.levels(width, e)[1:]
    return float(np.max(np.abs(all_levels(width, e)[1:] / expected - 1)))


def positions(count: int, seed: int = 0) -> np.ndarray:
    """Uniform and log-uniform t in [0, 1], with both ends."""
    rng = np.random.default_rng(seed)
    even, small = rng.random(count), np.exp(-12 * rng.random(count))
    return np.concatenate([[0, 1], even, small]).astype(np.float32)


@tuned
def test_positions_are_those_of_the_formula(width):
    e = NONUNIFORMITY[width]
    assert all_levels(width, e)[0] == 0
    assert relative_error(width, e) < PRECISION
    assert np.all(np.diff(all_levels(width, e)) > 0)


@given(width=st.sampled_from(WIDTHS), log_range=st.floats(0, 40))
def test_what_cannot_keep_the_precision_is_refused(width, log_range):
    """Drawn evenly in log(f(L) / f(1)), roughly: the same e is mild at 4 bits and wild at 16."""
    e = min(1.0, math.sqrt(math.expm1(log_range / levels.num_levels(width)) / 2))
    try:
        dq.DynamiQ(nonuniformity=((width, e),))
    except ValueError as error:
        assert "nonuniformity=" in str(error)
    else:
        assert relative_error(width, e) < PRECISION
        assert_unbiased(width, e, count=20)


@given(width=st.sampled_from(WIDTHS), gap_ratio=st.floats(1.1001, 6.999))
def test_rounding_is_unbiased_at_every_accepted_spacing(width, gap_ratio):
    e = math.sqrt(math.expm1(math.log(gap_ratio) / levels.num_levels(width)) / 2)
    dq.DynamiQ(nonuniformity=((width, e),))
    assert_unbiased(width, e, count=20)


@pytest.mark.parametrize("width", (4, 6, 8))
def test_gaps_grow_geometrically(width):
    e = NONUNIFORMITY[width]
    gaps = np.diff(all_levels(width, e))
    np.testing.assert_allclose(gaps[1:] / gaps[:-1], 1 + 2 * e * e, rtol=1e-4)
    assert e > 0


def test_a_width_has_two_signs_for_each_level():
    assert [levels.num_levels(width) for width in (0, 2, 4, 8, 16)] == [0, 1, 7, 127, 32767]


@tuned
def test_rounding_picks_one_of_the_two_neighbours(width):
    e = NONUNIFORMITY[width]
    f, t = oracle.levels(width, e), positions(4000)
    offsets = np.random.default_rng(1).random(t.size).astype(np.float32)
    codes = np.asarray(round_to_level(t, offsets, width, e)).astype(int)
    r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
    # A position within float32 rounding of a level may be taken for one on its other side.
    below, above = f[r] * (1 - 2 * PRECISION), f[r + 1] * (1 + 2 * PRECISION)
    assert np.all((f[codes] >= below) & (f[codes] <= above))
    assert 0.2 < np.mean(codes == r + 1) < 0.8


@tuned
def test_both_ends_are_exact_for_every_offset(width):
    offsets = np.linspace(0, 1 - 2.0**-10, 1024, dtype=np.float32)
    for t, code in ((0, 0), (1, levels.num_levels(width))):
        codes = round_to_level(np.full(1024, t, np.float32), offsets, width, NONUNIFORMITY[width])
        assert set(np.asarray(codes)) == {code}


@tuned
def test_rounding_is_monotone(width):
    """In t for every offset, and against the offset for every t."""
    e = NONUNIFORMITY[width]
    t = np.sort(positions(1000))
    offsets = np.linspace(0, 1, 64, endpoint=False, dtype=np.float32)
    codes = np.asarray(round_to_level(t[:, None], offsets[None], width, e))
    assert np.all(np.diff(codes, axis=0) >= 0)
    assert np.all(np.diff(codes, axis=1) <= 0)


@tuned
def test_rounding_is_unbiased_in_the_value(width):
    assert_unbiased(width, NONUNIFORMITY[width], count=100)
    assert_unbiased(width, 0.0, count=100)


def assert_unbiased(width: int, e: float, count: int) -> None:
    """The mean over an even grid of K offsets can be off by half a grid step, and by what a
    logarithm in float32 is off, and no more.

    Rounding in the log domain, the tempting mistake, is off by a hundred times that at 4 bits.
    """
    grid = 2048
    f, t = oracle.levels(width, e), positions(count)
    offsets = (np.arange(grid, dtype=np.float32) + np.float32(0.5)) / np.float32(grid)
    codes = np.asarray(round_to_level(t[:, None], offsets[None], width, e)).astype(int)
    r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
    gap = f[r + 1] - f[r]
    bias = np.abs(f[codes].mean(axis=1) - t)
    logarithm = 2.0**-24 / math.log1p(2 * e * e) if e else 0.0  # in gaps; 1/50 at the very worst
    assert logarithm < 0.021
    assert np.all(bias <= gap * (1.01 / (2 * grid) + logarithm) + 4 * PRECISION * t)
    assert np.ptp(codes, axis=1).max() == 1  # it did round, both ways


def test_error_coefficients_are_the_mean_squared_errors_of_uniform_levels():
    """E[(rounded - t)^2] over uniform t is 1 / (6 L^2): the same factor at every width."""
    t = (np.arange(1 << 16, dtype=np.float32) + np.float32(0.5)) / np.float32(1 << 16)
    offsets = np.random.default_rng(2).random(t.size).astype(np.float32)
    for width in (2, 4, 6, 8):
        codes = round_to_level(jnp.asarray(t), jnp.asarray(offsets), width, 0.0)
        rounded = np.asarray(level(codes, width, 0.0), np.float64)
        measured = np.mean((rounded - t) ** 2)
        assert measured == pytest.approx(levels.error_coefficient(width) / 6, rel=0.02)
    # Dropping a row loses all of it: more than rounding to one level does.
    assert levels.error_coefficient(0) > levels.error_coefficient(2)


@pytest.mark.parametrize("e_of", (NONUNIFORMITY.get, lambda width: 0.0), ids=("tuned", "uniform"))
def test_rows_of_different_widths_go_through_one_formula(e_of):
    """Columns, a width for every row, give the codes and positions that scalars give."""
    t = np.broadcast_to(positions(500), (len(WIDTHS), 1002))
    offsets = np.random.default_rng(3).random(t.shape).astype(np.float32)

    @jax.jit
    def by_rows(t, offsets):
        classes = [levels.make_levels(width, e_of(width)) for width in WIDTHS]
        columns = levels.levels_of_rows(classes, jnp.arange(len(WIDTHS)))
        codes = levels.round_to_level(t, offsets, columns)
        return codes, levels.level(codes, columns)

    codes, values = map(np.asarray, by_rows(t, offsets))
    for row, width in enumerate(WIDTHS):
        expected = np.asarray(round_to_level(t[row], offsets[row], width, e_of(width)))
        # The contraction of multiply-adds may differ: a few codes in a million hang on it.
        assert np.mean(codes[row] != expected) < (1e-3 if width < 13 else 2e-2)
        assert np.max(np.abs(codes[row] - expected)) <= 1
        np.testing.assert_allclose(
            values[row], level(codes[row], width, e_of(width)), rtol=2 * PRECISION
        )
    assert len({codes[row].max() for row in range(len(WIDTHS))}) == len(WIDTHS)
