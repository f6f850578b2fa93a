"""Laws of one quantization: unbiased, with the error that theory gives, at any magnitude."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamiq_jax.codec import packing, rounding, rows
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.codec.levels import make_levels
from tests.support import oracle
from tests.support.gradients import heavy_tailed

WIDTHS = tuple(width for width in packing.WIDTHS if width)
ROWS, GROUP_SIZE = 16, 32
TUNED, PAPER = oracle.Spacing("quadratic", 2.7), oracle.Spacing("geometric", 2.7)
UNIFORM = oracle.Spacing("quadratic", 1.0)
TINY = float(np.finfo(np.float32).tiny)
seeds = st.integers(0, 2**32 - 1)
widths = pytest.mark.parametrize("width", WIDTHS)


def _quantize(values, seed, width: int, spacing: oracle.Spacing):
    """Encoded and decoded again, f32[ROWS, 256]."""
    ids = jnp.arange(ROWS, dtype=jnp.uint32)
    offset = rounding.offsets(ids, 0, jnp.stack([seed, seed ^ np.uint32(77)]), "correlated")
    levels = make_levels(width, *spacing)
    encoded = rows.encode_rows(values, offset, levels, group_size=GROUP_SIZE)
    return rows.decode_rows(*encoded, levels, group_size=GROUP_SIZE)


@functools.partial(jax.jit, static_argnames=("width", "spacing"))
def _quantize_once(values, seed, width, spacing):
    return _quantize(values, seed, width, spacing)


@functools.partial(jax.jit, static_argnames=("width", "spacing"))
def _mean_and_square(values, first, count, width, spacing):
    """Mean error and mean squared error of each coordinate over `count` seeds."""

    def add(index, sums):
        error = _quantize(values, first + index.astype(jnp.uint32), width, spacing) - values
        return sums[0] + error, sums[1] + error * error

    zero = jnp.zeros_like(values)
    first_moment, second = jax.lax.fori_loop(0, count, add, (zero, zero))
    return first_moment / count.astype(jnp.float32), second / count.astype(jnp.float32)


def quantize(values: np.ndarray, width: int, seed: int = 0, spacing=TUNED) -> np.ndarray:
    return np.asarray(_quantize_once(values.astype(np.float32), np.uint32(seed), width, spacing))


def theory(
    values: np.ndarray, width: int, spacing: oracle.Spacing
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Neighbours below and above each magnitude, and the variance of rounding between them."""
    group_scales, super_scales = oracle.row_scales(values, GROUP_SIZE)
    scale = np.repeat(oracle.group_steps(group_scales, super_scales), GROUP_SIZE, axis=1)
    f, magnitude = oracle.levels(width, spacing), np.abs(values).astype(np.float64)
    t = np.minimum(np.divide(magnitude, scale, out=np.zeros_like(magnitude), where=scale > 0), 1)
    r = np.clip(np.searchsorted(f, t, side="right") - 1, 0, f.size - 2)
    return f[r] * scale, f[r + 1] * scale, (t - f[r]) * (f[r + 1] - t) * scale.astype(float) ** 2


def gradient(seed: int, scale: float = 1.0) -> np.ndarray:
    return heavy_tailed(seed, (ROWS, 256), spread=3.0, scale=scale)


def relative_error(values: np.ndarray, quantized: np.ndarray) -> float:
    """Squared error over squared norm, in float64: 1e-30 has no square in float32."""
    difference = quantized.astype(np.float64) - values
    return float(np.sum(difference**2) / np.sum(values.astype(np.float64) ** 2))


@widths
def test_the_estimate_is_unbiased(width):
    """The error of a mean over k seeds falls as 1 / sqrt(k), and is not zero to begin with."""
    values = gradient(0)
    errors = {}
    for count in (16, 1024):
        mean, _ = _mean_and_square(values, np.uint32(0), np.int32(count), width, TUNED)
        errors[count] = np.sqrt(relative_error(values, values + np.asarray(mean)))
    assert errors[16] > 0
    # 13 bits and more are a few float32 roundings away from exact, which do not average out.
    assert errors[16] / errors[1024] == pytest.approx(8, rel=0.15 if width < 13 else 0.35)


@widths
@pytest.mark.parametrize("spacing", (TUNED, PAPER, UNIFORM), ids=("tuned", "paper", "uniform"))
def test_the_error_is_the_one_of_theory(width, spacing):
    """Bounded from both sides: a codec that does nothing fails, and so does one that wastes."""
    values = gradient(1)
    _, square = _mean_and_square(values, np.uint32(5), np.int32(64), width, spacing)
    _, _, variance = theory(values, width, spacing)
    assert np.sum(square) == pytest.approx(np.sum(variance), rel=0.03 if width < 15 else 0.1)


@widths
def test_uniform_values_have_the_variance_of_uniform_spacing(width):
    """E = s^2 / (6 L^2) per coordinate, from one level to 32767."""
    values = np.random.default_rng(2).uniform(-1, 1, (ROWS, 256)).astype(np.float32)
    values[:, ::GROUP_SIZE] = 1.0  # pins every group scale
    error = np.mean((quantize(values, width, spacing=UNIFORM) - values).astype(np.float64) ** 2)
    assert error == pytest.approx(1 / (6 * (2 ** (width - 1) - 1) ** 2), rel=0.1)


@widths
@given(data=seeds, seed=seeds)
def test_every_value_goes_to_one_of_its_two_neighbours(width, data, seed):
    values = gradient(data)
    magnitude = np.abs(quantize(values, width, seed))
    below, above, _ = theory(values, width, TUNED)
    slack = 2.0**-19
    assert np.all(magnitude >= below * (1 - slack))
    assert np.all(magnitude <= above * (1 + slack))
    assert np.any(magnitude != np.abs(values))


@widths
@given(data=seeds, seed=seeds, power=st.integers(-70, 70))
def test_a_power_of_two_passes_through_exactly(width, data, seed, power):
    values = gradient(data)
    scaled = quantize(np.ldexp(values, power), width, seed)
    np.testing.assert_array_equal(scaled, np.ldexp(quantize(values, width, seed), power))


@widths
@given(data=seeds, seed=seeds)
def test_the_sign_passes_through_exactly(width, data, seed):
    values = gradient(data)
    np.testing.assert_array_equal(quantize(-values, width, seed), -quantize(values, width, seed))


@widths
@given(data=seeds, seed=seeds)
def test_zeros_are_exact(width, data, seed):
    values = gradient(data)
    zero = np.random.default_rng(data).random(values.shape) < 0.5
    zero[0] = True
    values[zero] = np.copysign(np.float32(0), values[zero])
    quantized = quantize(values, width, seed)
    assert np.all(quantized[zero] == 0)
    assert np.any(quantized[~zero] != 0)


@pytest.mark.parametrize("width", (0, *WIDTHS))
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_surfaces_in_its_row_and_nowhere_else(width, bad):
    values = gradient(3)
    clean = quantize(values, width)
    values[5, 123] = bad
    quantized = quantize(values, width)
    assert np.isnan(quantized[5]).all()
    others = np.arange(ROWS) != 5
    np.testing.assert_array_equal(quantized[others], clean[others])
    assert np.isfinite(quantized[others]).all()


def test_width_zero_drops_finite_rows():
    assert not np.any(quantize(gradient(4), 0))


@widths
@pytest.mark.parametrize("scale", (1e-30, 1e30))
def test_magnitude_does_not_matter(width, scale):
    values = gradient(6)
    reference = relative_error(values, quantize(values, width))
    scaled = (values.astype(np.float64) * scale).astype(np.float32)
    error = relative_error(scaled, quantize(scaled, width))
    assert error > 0
    assert error == pytest.approx(reference, rel=0.2)


@widths
@given(data=seeds, seed=seeds)
def test_subnormals_are_small_or_zero_and_never_nan(width, data, seed):
    """Hardware may flush them to zero; nothing else may happen to them, or to their row."""
    rng = np.random.default_rng(data)
    values = (rng.standard_normal((ROWS, 256)) * TINY / 8).astype(np.float32)
    assert np.any(values)
    values[1::2, 0] = 1e-20  # every other row has one normal value
    quantized = quantize(values, width, seed)
    assert np.isfinite(quantized).all()
    assert np.all(np.abs(quantized[::2]) <= 2 * TINY)
    assert quantized[1::2, 0] == pytest.approx(1e-20, rel=0.02)


@pytest.mark.parametrize("width", (4, 8, 16))
@given(data=seeds, seed=seeds)
def test_one_huge_value_in_a_row_of_tiny_ones(width, data, seed):
    values = gradient(data, scale=1e-30)
    values[:, 200] = 1e30
    quantized = quantize(values, width, seed)
    assert np.isfinite(quantized).all()
    # The super-scale is at most 2^-7 above the value, which is next to the top level.
    gap = 1 - oracle.levels(width, TUNED)[-2]
    assert np.all(np.abs(quantized[:, 200] / 1e30 - 1) <= gap)
    # A tiny group costs at most one step of the group scale, 1/255 of the huge value.
    assert np.all(np.abs(np.delete(quantized, 200, axis=1)) <= 1.01e30)
    far = np.delete(quantized, range(192, 224), axis=1)
    assert np.all(np.abs(far) <= 1e30 / 250)


def test_one_value_of_each_magnitude_survives_in_its_own_row():
    """Rows share nothing: 1e-30 beside 1e30 keeps its relative accuracy at 8 bits."""
    values = gradient(8)
    magnitudes = np.logspace(-30, 30, ROWS)[:, None]
    quantized = quantize((values * magnitudes).astype(np.float32), 8) / magnitudes
    reference = quantize(values, 8)
    norms = np.sum(values.astype(np.float64) ** 2, axis=1)
    ours = np.sum((quantized - values) ** 2, axis=1) / norms
    expected = np.sum((reference.astype(np.float64) - values) ** 2, axis=1) / norms
    np.testing.assert_allclose(ours, expected, rtol=0.5)
    assert np.all(ours > 0)
