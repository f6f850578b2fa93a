"""Scales cover every value, waste less than one step, and are those of the wire format."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.codec import scales
from tests.support import oracle

pytestmark = pytest.mark.optimized

ROWS, GROUPS = 8, 8
TINY = np.finfo(np.float32).tiny


@jax.jit
def quantize(maxima):
    """`scales.quantize_scales` of float32 maxima."""
    return scales.quantize_scales(jax.lax.bitcast_convert_type(maxima, np.uint32))


reconstruct = jax.jit(scales.reconstruct_scales)
reciprocal = jax.jit(scales.reciprocal)
bfloat16_bits = jax.jit(scales.bfloat16_bits)
bfloat16_value = jax.jit(scales.bfloat16_value)
seeds = st.integers(0, 2**32 - 1)


def random_maxima(seed: int, low: float = -100, high: float = 120) -> np.ndarray:
    """[ROWS, GROUPS]: rows anywhere in 2^low .. 2^high, groups up to 2^12 below their row."""
    rng = np.random.default_rng(seed)
    rows = np.exp2(rng.uniform(low, high, (ROWS, 1)))
    return (rows * np.exp2(-12 * rng.random((ROWS, GROUPS)))).astype(np.float32)


def group_maxima_of(rows: np.ndarray, group_size: int) -> np.ndarray:
    bits = jax.jit(scales.group_maxima, static_argnums=1)(rows, group_size)
    return np.asarray(bits).view(np.float32)


@pytest.mark.parametrize("group_size", (8, 16, 32))
@pytest.mark.parametrize("num_rows", (1, 8, 100))
def test_group_maxima_are_magnitudes_and_show_nan_wherever_it_is(num_rows, group_size):
    """Backends disagree on max(x, NaN), and one backend with itself from shape to shape."""
    clean = np.random.default_rng(0).standard_normal((num_rows, 256)).astype(np.float32)
    expected = np.abs(clean).reshape(num_rows, -1, group_size).max(axis=2)
    np.testing.assert_array_equal(group_maxima_of(clean, group_size), expected)
    for lane in range(0, 256, 11):
        rows, row = clean.copy(), lane % num_rows
        rows[row, lane] = np.nan
        found = np.isnan(group_maxima_of(rows, group_size))
        assert np.argwhere(found).tolist() == [[row, lane // group_size]]


@given(seed=seeds)
def test_bytes_are_those_of_the_oracle(seed):
    maxima = random_maxima(seed)
    group_bytes, super_bits = (np.asarray(part) for part in quantize(maxima))
    expected_bytes, expected_bits = oracle.row_scales(np.repeat(maxima, 256 // GROUPS, axis=1), 32)
    assert (group_bytes.dtype, super_bits.dtype) == (np.uint8, np.uint16)
    np.testing.assert_array_equal(super_bits, expected_bits)
    np.testing.assert_array_equal(group_bytes, expected_bytes)
    steps = np.asarray(reconstruct(group_bytes, super_bits))
    np.testing.assert_array_equal(steps, oracle.group_steps(group_bytes, super_bits))


def test_the_smallest_normal_rows_have_the_scale_of_the_page():
    """A backend that flushes subnormals must not lose rows from 2^-118 on, whose steps of 1/255
    of the super-scale are normal.
    """
    maxima = np.tile(np.exp2(np.arange(-118, -110))[:, None], GROUPS).astype(np.float32)
    group_bytes, super_bits = (np.asarray(part) for part in quantize(maxima))
    steps = np.asarray(reconstruct(group_bytes, super_bits))
    np.testing.assert_array_equal(steps, oracle.group_steps(group_bytes, super_bits))
    assert np.all(steps > 0)


@given(seed=seeds)
def test_scales_cover_their_group_and_waste_less_than_one_step(seed):
    """The super-scale is the next bfloat16, of which each group has the next part."""
    maxima = random_maxima(seed)
    group_bytes, super_bits = quantize(maxima)
    largest, below = maxima.max(axis=1), np.asarray(super_bits) - np.uint16(1)
    assert np.all(oracle.bf16_to_f32(np.asarray(super_bits)) >= largest)
    assert np.all(oracle.bf16_to_f32(below) < largest)
    steps = np.asarray(reconstruct(group_bytes, super_bits), np.float64)
    one = oracle.bf16_to_f32(np.asarray(super_bits)).astype(np.float64)[:, None] / 255
    # Up to the float32 rounding of the ratio, the product and the reconstruction.
    assert np.all(steps >= maxima * (1 - 2.0**-21))
    assert np.all(steps < maxima + one * (1 + 2.0**-21))
    assert np.asarray(group_bytes).max() >= 254  # the super-scale is at most 2^-7 above its row


@pytest.mark.parametrize("bad", (np.nan, np.inf, np.finfo(np.float32).max))  # above bfloat16
def test_a_row_that_is_not_finite_carries_the_one_nan_and_leaves_others_alone(bad):
    maxima = random_maxima(0)
    clean_bytes, clean_bits = quantize(maxima)
    maxima[3, 1] = bad
    group_bytes, super_bits = quantize(maxima)
    assert int(super_bits[3]) == oracle.BF16_NAN
    assert np.isnan(np.asarray(reconstruct(group_bytes, super_bits))[3]).all()
    others = np.arange(ROWS) != 3
    np.testing.assert_array_equal(np.asarray(super_bits)[others], np.asarray(clean_bits)[others])
    np.testing.assert_array_equal(np.asarray(group_bytes)[others], np.asarray(clean_bytes)[others])


@given(seed=seeds)
def test_reciprocal_inverts_normal_scales_and_is_zero_of_others(seed):
    scale = random_maxima(seed)
    scale[0, :4] = 0, TINY / 2, TINY, 1
    inverse = np.asarray(reciprocal(scale), np.float64)
    assert (inverse[0, :4] != 0).tolist() == [False, False, True, True]
    product = scale.astype(np.float64) * inverse
    assert np.all(np.abs(product.reshape(-1)[2:] - 1) <= 2.0**-23)


@given(seed=seeds)
def test_bfloat16_bits_round_to_nearest_even(seed):
    values = random_maxima(seed) * np.float32(-1) ** np.arange(GROUPS, dtype=np.float32)
    values[0, :2] = np.float32(1) + np.float32(2.0**-8), np.float32(1) + np.float32(3 * 2.0**-8)
    bits = np.asarray(bfloat16_bits(values))
    np.testing.assert_array_equal(bits, oracle.bf16_nearest(values))
    back = np.asarray(bfloat16_value(bits.astype(np.uint32)))
    np.testing.assert_array_equal(back, oracle.bf16_to_f32(bits))
    assert np.all(np.abs(back / values - 1) <= 2.0**-8)
    assert np.any(back != values)
    # What is not finite as bfloat16 has one pattern.
    values[0, :5] = np.nan, -np.nan, np.inf, -np.inf, np.finfo(np.float32).max
    assert set(np.asarray(bfloat16_bits(values))[0, :5].tolist()) == {oracle.BF16_NAN}


# Linear within an octave where a logarithm is not: 0.087 octaves at most, for the squares once and
# for the super-scale twice; and whole steps of 1/32.
ENERGY_ERROR = 3 * 0.087 + 2 / 32


@pytest.mark.parametrize("groups", (8, 32))
@given(seed=seeds)
def test_energies_are_those_of_the_page_and_logarithms(groups, seed):
    rng = np.random.default_rng(seed)
    group_bytes = rng.integers(0, 256, (64, groups)).astype(np.uint8)
    group_bytes[np.arange(64), rng.integers(0, groups, 64)] = 255  # as the largest always is
    super_bits = oracle.bf16_nearest(np.exp2(rng.uniform(-126, 126, 64)))
    found = np.asarray(jax.jit(scales.row_energies)(group_bytes, super_bits))
    assert found.dtype == np.uint16 and found.max() < 2**15
    np.testing.assert_array_equal(found, oracle.row_energies(group_bytes, super_bits))
    steps = oracle.group_steps(group_bytes, super_bits).astype(np.float64)
    octaves = np.log2(np.sum(steps**2, axis=1))
    offset = found / 32 - octaves
    assert np.ptp(offset) < ENERGY_ERROR


def test_energies_of_zeros_and_of_what_is_lost_are_lowest():
    group_bytes = np.array([[0] * 8, [255] * 8, [255] * 8], np.uint8)
    super_bits = np.array([0, oracle.BF16_NAN, 1 << 7], np.uint16)
    zero, lost, tiny = (int(e) for e in jax.jit(scales.row_energies)(group_bytes, super_bits))
    assert (zero, lost) == (0, 0) and tiny > 0


@jax.jit
def inverses(group_scales, super_bits):
    """Factors of groups of the kernels, and of the base."""
    scale = scales.reconstruct_scales(group_scales, super_bits)
    return scales.inverse_of_groups(group_scales, super_bits), scales.reciprocal(scale)


def test_one_check_a_row_gives_the_inverses_of_its_groups():
    group_scales = np.tile(np.arange(256, dtype=np.float32), (4, 1))
    largest = np.array([2.0**126 - 2.0**118, 1, 2.0**-118, 2.0**-119], np.float32)
    found, expected = map(np.asarray, inverses(group_scales, largest.view(np.uint32) >> 16))
    np.testing.assert_array_equal(found[:, 1:], expected[:, 1:])
    assert (found[:3, 1:] != 0).all() and not found[3].any()
    # A group scale of 0: below its share of the largest, 2^-140, values stay far below a level.
    assert (found[:, 0] * largest <= 256).all()
    # Rows of zeros and of subnormals are normalized to zero.
    super_bits = np.array([0, 0x0040], np.uint32)
    for factors in inverses(np.zeros((2, GROUPS), np.float32), super_bits):
        assert not np.any(factors)


def test_the_reciprocal_of_a_super_scale_is_normal_even_if_it_is_off():
    """That of 2^126 is the smallest normal number, and one unit less is flushed."""
    largest = np.float32(2.0**126 - 2.0**118)
    maxima = np.array([largest, np.nextafter(largest, np.inf), 2.0**126], np.float32)
    super_bits = scales.quantize_super_scales(maxima.view(np.uint32))
    np.testing.assert_array_equal(super_bits, [0x7E7F, 0x7FC0, 0x7FC0])
