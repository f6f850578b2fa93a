"""Levels follow their formula, and rounding between them is monotone and unbiased."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from pallas_kernels.codec import arithmetic, levels, packing
from tests.support import oracle

pytestmark = pytest.mark.optimized

WIDTHS = tuple(width for width in packing.WIDTHS if width)
PRECISION = 2.0**-21  # of f, promised by the wire format

TUNED, PAPER = oracle.Spacing("quadratic", 2.7), oracle.Spacing("geometric", 2.7)
UNIFORM = oracle.Spacing("quadratic", 1.0)
SPACINGS = (TUNED, PAPER, UNIFORM)
every_spacing = pytest.mark.parametrize(
    "spacing", SPACINGS, ids=lambda s: f"{s.kind}-{s.gap_ratio}"
)

_position = jax.jit(lambda codes, levels: levels.position(codes))
_round_to_level = jax.jit(levels.round_to_level)


def round_to_level(t, offset, width: int, spacing: oracle.Spacing):
    return np.asarray(_round_to_level(t, offset, levels.make_levels(width, *spacing))).astype(
        np.float32
    )


def all_levels(width: int, spacing: oracle.Spacing) -> np.ndarray:
    codes = np.arange(levels.num_levels(width) + 1, dtype=np.float32)
    return np.asarray(_position(codes, levels.make_levels(width, *spacing)), np.float64)


def relative_error(width: int, spacing: oracle.Spacing) -> float:
    expected = oracle.levels(width, spacing)[1:]
    return float(np.max(np.abs(all_levels(width, spacing)[1:] / expected - 1)))


def positions(count: int, seed: int = 0) -> np.ndarray:
    """Uniform and log-uniform t in [0, 1], with both ends."""
    rng = np.random.default_rng(seed)
    even, small = rng.random(count), np.exp(-12 * rng.random(count))
    return np.concatenate([[0, 1], even, small]).astype(np.float32)


@every_spacing
def test_positions_are_those_of_the_formula(spacing):
    for width in WIDTHS:
        assert all_levels(width, spacing)[0] == 0
        assert relative_error(width, spacing) < PRECISION, width
        assert np.all(np.diff(all_levels(width, spacing)) > 0), width
        # The largest code is the mask of magnitudes.
        top = levels.top_code(levels.make_levels(width, *spacing))
        assert int(top) == levels.num_levels(width) == 2 ** (width - 1) - 1, width


def test_uniform_levels_do_not_depend_on_the_spacing():
    for width in packing.WIDTHS:
        quadratic, geometric = (
            levels.make_levels(width, kind, 1.0) for kind in ("quadratic", "geometric")
        )
        assert isinstance(quadratic, levels.UniformLevels)
        assert quadratic == geometric


kinds, ratios = st.sampled_from(("quadratic", "geometric")), st.floats(0.5, 12) | st.just(1.0)


@given(width=st.sampled_from(WIDTHS), spacing=st.builds(oracle.Spacing, kinds, ratios))
def test_what_cannot_keep_the_precision_is_refused(width, spacing):
    try:
        dq.DynamiQ(spacing=spacing.kind, gap_ratio=spacing.gap_ratio)
    except ValueError as error:
        assert "gap_ratio=" in str(error)
    else:
        assert relative_error(width, spacing) < PRECISION
        assert_unbiased(width, spacing, count=20)


LOWEST, HIGHEST = levels.MIN_GAP_RATIO, levels.MAX_GAP_RATIO


@pytest.mark.parametrize(
    "spacing",
    [*SPACINGS, *(oracle.Spacing(k, r) for k, most in HIGHEST.items() for r in (LOWEST, most))],
    ids=lambda s: f"{s.kind}-{s.gap_ratio}",
)
def test_rounding_is_unbiased_in_the_value_at_every_accepted_spacing(spacing):
    dq.DynamiQ(spacing=spacing.kind, gap_ratio=spacing.gap_ratio)
    for width in WIDTHS:
        assert_unbiased(width, spacing, count=40)


@every_spacing
def test_rounding_picks_one_of_the_two_neighbors(spacing):
    t = positions(4000)
    offsets = np.random.default_rng(1).random(t.size).astype(np.float32)
    for width in WIDTHS:
        f = oracle.levels(width, spacing)
        codes = np.asarray(round_to_level(t, offsets, width, spacing)).astype(int)
        r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
        # A position within float32 rounding of a level may be taken for one on its other side.
        below, above = f[r] * (1 - 2 * PRECISION), f[r + 1] * (1 + 2 * PRECISION)
        assert np.all((f[codes] >= below) & (f[codes] <= above)), width
        assert 0.2 < np.mean(codes == r + 1) < 0.8, width


@every_spacing
def test_rounding_is_monotone_and_exact_at_both_ends(spacing):
    """It rises with t for every offset, and falls with the offset for every t."""
    t = np.sort(positions(1000))
    offsets = np.linspace(0, 1 - 2.0**-10, 64, dtype=np.float32)
    for width in WIDTHS:
        codes = np.asarray(round_to_level(t[:, None], offsets[None], width, spacing))
        assert np.all(np.diff(codes, axis=0) >= 0), width
        assert np.all(np.diff(codes, axis=1) <= 0), width
        assert not codes[0].any() and np.all(codes[-1] == levels.num_levels(width)), width


def assert_unbiased(width: int, spacing: oracle.Spacing, count: int) -> None:
    """Check that the mean over an even grid of offsets is off by at most half a step of the grid
    and the error of a float32 logarithm or root.

    Rounding in the log domain would be off by a hundred times that at 4 bits.
    """
    grid = 2048
    f, t = oracle.levels(width, spacing), positions(count)
    offsets = (np.arange(grid, dtype=np.float32) + np.float32(0.5)) / np.float32(grid)
    codes = np.asarray(round_to_level(t[:, None], offsets[None], width, spacing)).astype(int)
    r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
    gap = f[r + 1] - f[r]
    bias = np.abs(f[codes].mean(axis=1) - t)
    # Error of a code before it is rounded, in gaps: at 8 bits a ten-thousandth.
    inverse = 2.0**-20 * f.size / math.log(max(spacing.gap_ratio, 1.1))
    assert np.all(bias <= gap * (1.01 / (2 * grid) + inverse) + 4 * PRECISION * t), width
    assert np.ptp(codes, axis=1).max() == 1  # both up and down


@pytest.mark.parametrize("tail", (None, 3))
def test_distortions_are_those_of_rows_within_a_common_factor(tail):
    """Expected squared errors over squared norms, of groups of 32 and stochastic rounding."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1 << 12, 32)) if tail is None else rng.standard_t(tail, (1 << 12, 32))
    scale = np.abs(x).max(axis=1, keepdims=True)
    t = np.abs(x) / scale
    factors = []
    for width in range(2, 17):
        f = oracle.levels(width, oracle.Spacing("quadratic", 2.7))
        below = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
        errors = scale**2 * (t - f[below]) * (f[below + 1] - t)
        factors.append(errors.sum() / np.square(x).sum() / levels.distortion(width))
    assert max(factors) / min(factors) < 1.15**2
    # Dropping a row loses all of it, which is what rounding to one level costs.
    assert 0.8 < levels.distortion(0) / levels.distortion(2) / factors[0] < 1.3


@every_spacing
def test_rows_of_different_widths_go_through_one_formula(spacing):
    """Columns with a width for every row give the codes and positions that scalars give."""
    t = np.broadcast_to(positions(500), (len(WIDTHS), 1002))
    offsets = np.random.default_rng(3).random(t.shape).astype(np.float32)
    of_widths = [levels.make_levels(width, *spacing) for width in WIDTHS]

    @jax.jit
    def by_rows(t, offsets):
        columns = levels.levels_of_rows(of_widths, jnp.arange(len(WIDTHS)))
        codes = levels.round_to_level(t, offsets, columns)
        return arithmetic.code_to_float(codes), columns.position(arithmetic.code_to_float(codes))

    codes, values = map(np.asarray, by_rows(t, offsets))
    for row, (width, scalars) in enumerate(zip(WIDTHS, of_widths, strict=True)):
        expected = np.asarray(round_to_level(t[row], offsets[row], width, spacing))
        # The contraction of multiply-adds may differ, and with it a few codes.
        assert np.mean(codes[row] != expected) < (1e-3 if width < 13 else 2e-2)
        assert np.max(np.abs(codes[row] - expected)) <= 1
        np.testing.assert_allclose(values[row], _position(codes[row], scalars), rtol=2 * PRECISION)
    assert len({codes[row].max() for row in range(len(WIDTHS))}) == len(WIDTHS)


def test_levels_are_selected_as_they_are_gathered():
    classes = [levels.make_levels(width, "quadratic", 2.0) for width in WIDTHS]
    index = jnp.array([3, 0, len(WIDTHS) - 1, 3])
    ways = (levels.gather_levels, levels.select_levels)
    for found in zip(*(jax.tree.leaves(way(classes, index)) for way in ways), strict=True):
        np.testing.assert_array_equal(*found)
