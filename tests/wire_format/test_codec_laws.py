"""Laws of one quantization: unbiased, with the error that theory predicts, at any magnitude.

All widths are quantized in one program, as columns of levels, as in the message of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.codec import packing, rounding, rows
from pallas_kernels.codec.levels import levels_of_rows, make_levels
from tests.support import oracle
from tests.support.gradients import heavy_tailed

pytestmark = pytest.mark.optimized

WIDTHS = packing.WIDTHS  # 0 and 2 to 16
CODE_WIDTHS = WIDTHS[1:]
ROWS, GROUP_SIZE = 16, 32
TUNED, PAPER = oracle.Spacing("quadratic", 2.7), oracle.Spacing("geometric", 2.7)
UNIFORM = oracle.Spacing("quadratic", 1.0)
TINY = float(np.finfo(np.float32).tiny)
seeds = st.integers(0, 2**32 - 1)
few_examples = settings(max_examples=10)  # of all widths each


def _quantize(values, seed, spacing=TUNED, group_size=GROUP_SIZE, kind="correlated"):
    """Encode and decode float32 [len(WIDTHS), ROWS, 256], each width with the same noise."""
    ids = jnp.tile(jnp.arange(ROWS, dtype=jnp.uint32), len(WIDTHS))
    offset = rounding.offsets(ids, 0, jnp.stack([seed, seed ^ np.uint32(77)]), kind)
    of_widths = [make_levels(width, *spacing) for width in WIDTHS]
    levels = levels_of_rows(of_widths, jnp.repeat(jnp.arange(len(WIDTHS)), ROWS))
    encoded = rows.encode_rows(values.reshape(-1, 256), offset, levels, group_size=group_size)
    return rows.decode_rows(*encoded, levels, group_size=group_size).reshape(values.shape)


STATIC = ("spacing", "group_size", "kind")
_quantize_once = jax.jit(_quantize, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def _mean_and_square(values, first, count, **arguments):
    """Mean error and mean squared error of each coordinate over `count` seeds."""

    def add(index, sums):
        error = _quantize(values, first + index.astype(jnp.uint32), **arguments) - values
        return sums[0] + error, sums[1] + error * error

    zero = jnp.zeros_like(values)
    first_moment, second = jax.lax.fori_loop(0, count, add, (zero, zero))
    return first_moment / count.astype(jnp.float32), second / count.astype(jnp.float32)


def for_all_widths(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(values.astype(np.float32), (len(WIDTHS), ROWS, 256))


def quantize(values: np.ndarray, seed: int = 0, **arguments) -> dict[int, np.ndarray]:
    """Return values [ROWS, 256] after a quantization at each width."""
    found = np.asarray(_quantize_once(for_all_widths(values), np.uint32(seed), **arguments))
    return dict(zip(WIDTHS, found, strict=True))


def with_codes(found: dict[int, np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """Return all but width 0."""
    return [(width, found[width]) for width in CODE_WIDTHS]


def moments(values: np.ndarray, first: int, count: int, **arguments) -> list[dict[int, np.ndarray]]:
    """Return the mean error and the mean squared error at each width with codes."""
    found = _mean_and_square(for_all_widths(values), np.uint32(first), np.int32(count), **arguments)
    return [dict(zip(WIDTHS, np.asarray(part), strict=True)) for part in found]


def theory(
    values: np.ndarray, width: int, spacing: oracle.Spacing, group_size: int = GROUP_SIZE
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Neighbors below and above each magnitude, and the variance of rounding between them."""
    group_scales, super_scales = oracle.row_scales(values, group_size)
    scale = np.repeat(oracle.group_steps(group_scales, super_scales), group_size, axis=1)
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


@pytest.mark.parametrize("kind", ("correlated", "independent"))
def test_the_estimate_is_unbiased(kind):
    """The error of a mean over k seeds falls as 1 / sqrt(k), and is not zero to begin with."""
    values = gradient(0)
    few, many = (moments(values, 0, count, kind=kind)[0] for count in (16, 1024))
    for width in CODE_WIDTHS:
        first, last = (np.sqrt(relative_error(values, values + m[width])) for m in (few, many))
        assert first > 0
        # 13 bits and more are a few float32 roundings away from exact, which do not average out.
        assert first / last == pytest.approx(8, rel=0.15 if width < 13 else 0.35), width


@pytest.mark.parametrize(
    ("spacing", "group_size"),
    ((TUNED, 32), (PAPER, 16), (UNIFORM, 8)),
    ids=("tuned", "paper", "uniform"),
)
def test_the_error_is_that_of_theory(spacing, group_size):
    """Bounded from both sides: a codec that does nothing fails, and so does one that wastes."""
    values = gradient(1)
    _, square = moments(values, 5, 64, spacing=spacing, group_size=group_size)
    for width in CODE_WIDTHS:
        _, _, variance = theory(values, width, spacing, group_size)
        expected = pytest.approx(np.sum(variance), rel=0.03 if width < 15 else 0.1)
        assert np.sum(square[width]) == expected, width


@few_examples
@given(data=seeds, seed=seeds)
def test_every_value_goes_to_one_of_its_two_neighbors(data, seed):
    """To the nearest one, if that is the kind of rounding."""
    values, slack = gradient(data), 2.0**-19
    nearest = quantize(values, kind="nearest")
    for width, quantized in with_codes(quantize(values, seed)):
        magnitude = np.abs(quantized)
        below, above, _ = theory(values, width, TUNED)
        assert np.all(magnitude >= below * (1 - slack)), width
        assert np.all(magnitude <= above * (1 + slack)), width
        assert np.any(magnitude != np.abs(values)), width
        half = (above - below) / 2 + slack * above
        assert np.all(np.abs(nearest[width] - values) <= half), width
        assert np.any(nearest[width] != values), width


@few_examples
@given(data=seeds, seed=seeds, power=st.integers(-70, 70))
def test_powers_of_two_and_signs_pass_through_exactly(data, seed, power):
    values = gradient(data)
    scaled, found = quantize(np.ldexp(values, power), seed), quantize(values, seed)
    nearest, negative = (quantize(sign * values, kind="nearest") for sign in (1, -1))
    for width in WIDTHS:
        np.testing.assert_array_equal(scaled[width], np.ldexp(found[width], power))
        np.testing.assert_array_equal(negative[width], -nearest[width])
    for _, quantized in with_codes(found):
        np.testing.assert_array_equal(np.signbit(quantized), np.signbit(values))


@few_examples
@given(data=seeds, seed=seeds)
def test_an_offset_moves_values_of_either_sign_in_one_direction(data, seed):
    """Whatever rounds up at a probability of a half does so with its sign reversed."""
    values = gradient(data)
    negative = quantize(-values, seed)
    for width, quantized in with_codes(quantize(values, seed)):
        below, above, _ = theory(values, width, TUNED)
        share = (np.abs(values) - below) / np.where(above > below, above - below, 1)
        middle = (np.abs(share - 0.5) < 0.05) & (values != 0)
        up = quantized > values, negative[width] > -values
        agree = np.mean(up[0][middle] == up[1][middle])
        assert agree > 0.8, width


@few_examples
@given(data=seeds, seed=seeds)
def test_zeros_are_exact(data, seed):
    values = gradient(data)
    zero = np.random.default_rng(data).random(values.shape) < 0.5
    zero[0] = True
    values[zero] = np.copysign(np.float32(0), values[zero])
    for width, quantized in with_codes(quantize(values, seed)):
        assert np.all(quantized[zero] == 0), width
        np.testing.assert_array_equal(np.signbit(quantized), np.signbit(values))
        assert np.any(quantized[~zero] != 0), width


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_shows_in_its_row_and_nowhere_else(bad):
    values, others = gradient(3), np.arange(ROWS) != 5
    clean = quantize(values)
    values[5, 123] = bad
    assert not np.any(clean[0])  # width 0 drops finite rows
    for width, quantized in quantize(values).items():
        assert np.isnan(quantized[5]).all(), width
        np.testing.assert_array_equal(quantized[others], clean[width][others])
        assert np.isfinite(quantized[others]).all(), width


@few_examples
@given(data=seeds, seed=seeds)
def test_subnormals_are_small_or_zero_and_never_nan(data, seed):
    """Hardware may flush them to zero. Nothing else may happen to them, or to their row."""
    rng = np.random.default_rng(data)
    values = (rng.standard_normal((ROWS, 256)) * TINY / 8).astype(np.float32)
    assert np.any(values)
    values[1::2, 0] = 1e-20  # every other row has one normal value
    for width, quantized in with_codes(quantize(values, seed)):
        assert np.isfinite(quantized).all(), width
        assert np.all(np.abs(quantized[::2]) <= 2 * TINY), width
        assert quantized[1::2, 0] == pytest.approx(1e-20, rel=0.02), width


@few_examples
@given(data=seeds, seed=seeds)
def test_one_huge_value_in_a_row_of_tiny_ones(data, seed):
    values = gradient(data, scale=1e-30)
    values[:, 200] = 1e30
    for width, quantized in with_codes(quantize(values, seed)):
        assert np.isfinite(quantized).all(), width
        # The super-scale is at most 2^-7 above the value, which is next to the top level.
        gap = 1 - oracle.levels(width, TUNED)[-2]
        assert np.all(np.abs(quantized[:, 200] / 1e30 - 1) <= gap + 2.0**-20), width
        # A tiny group costs at most one step of the group scale, 1/255 of the huge value.
        assert np.all(np.abs(np.delete(quantized, 200, axis=1)) <= 1.01e30), width
        far = np.delete(quantized, range(192, 224), axis=1)
        assert np.all(np.abs(far) <= 1e30 / 250), width
