"""Elements and scales of the MX formats are those of ml_dtypes, bit for bit."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiq_jax.methods import _minifloat as minifloat
from dynamiq_jax.methods._minifloat import ELEMENTS

pytestmark = pytest.mark.optimized

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 448, "e5m2": 57344, "e3m2": 28, "e2m3": 7.5, "e2m1": 6, "int8": 127 / 64}
TINY = np.finfo(np.float32).tiny
every_element = pytest.mark.parametrize("name", ELEMENTS)
seeds = st.integers(0, 2**32 - 1)


@functools.partial(jax.jit, static_argnums=2)
def _encode(values, scales, name):
    return minifloat.encode(values, scales, ELEMENTS[name])


@functools.partial(jax.jit, static_argnums=2)
def _decode(codes, scales, name):
    return minifloat.decode(codes, scales, ELEMENTS[name])


@functools.partial(jax.jit, static_argnums=1)
def _block_scales(maxima, name):
    bits = jax.lax.bitcast_convert_type(maxima, np.uint32)
    return minifloat.block_scales(bits, ELEMENTS[name])


def encode(values: np.ndarray, name: str, scales=np.uint8(minifloat.ONE)) -> np.ndarray:
    scales = np.broadcast_to(np.uint8(scales), values.shape)
    return np.asarray(_encode(np.asarray(values, np.float32), scales, name))


def decode(codes: np.ndarray, name: str, scales=np.uint8(minifloat.ONE)) -> np.ndarray:
    scales = np.broadcast_to(np.uint8(scales), codes.shape)
    return np.asarray(_decode(codes.astype(np.uint16), scales, name))


def expected_codes(values: np.ndarray, name: str) -> np.ndarray:
    """Codes of float32 values by ml_dtypes, which does not saturate; INT8 by its definition."""
    clipped = np.clip(values, -LARGEST[name], LARGEST[name]).astype(np.float32)
    if name == "int8":
        return np.rint(clipped * 64).astype(np.int8).view(np.uint8)
    return clipped.astype(DTYPES[name]).view(np.uint8)


def code_values(name: str) -> np.ndarray:
    """Values of all codes, float64, in the order of the codes."""
    codes = np.arange(2 ** ELEMENTS[name].bits, dtype=np.uint8)
    if name == "int8":
        return codes.view(np.int8) / 64
    return codes.view(DTYPES[name]).astype(np.float64)


def finite_values(name: str) -> np.ndarray:
    """All finite values once, in order."""
    values = code_values(name)
    return np.unique(values[np.isfinite(values)])


def random_floats(seed: int, count: int = 1024) -> np.ndarray:
    """Any bits that are a finite float32, and values around one."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    near = rng.standard_normal(count) * np.exp2(rng.uniform(-20, 18, count))
    anything = np.where(np.isfinite(anything), anything, np.float32(0))
    return np.concatenate([anything, near.astype(np.float32)])


@every_element
def test_the_format_is_the_one_that_ml_dtypes_knows(name):
    element, values = ELEMENTS[name], finite_values(name)
    assert values.max() == LARGEST[name]
    assert 2.0**element.max_exponent <= LARGEST[name] < 2.0 ** (element.max_exponent + 1)
    if name in DTYPES:
        info = ml_dtypes.finfo(DTYPES[name])
        assert (info.bits, info.nmant) == (element.bits, element.mantissa_bits)
        assert float(info.smallest_normal) == 2.0**element.min_exponent


@every_element
def test_every_value_and_every_midpoint_round_to_the_nearest_even_code_and_saturate(name):
    values = finite_values(name)
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    beyond = np.float32([1e30, -1e30, np.inf, -np.inf])
    inputs = np.concatenate([values.astype(np.float32), middles, *around, beyond])
    np.testing.assert_array_equal(encode(inputs, name), expected_codes(inputs, name))


@every_element
@given(seed=seeds)
def test_a_scale_divides_without_rounding(name, seed):
    """Every scale, and every float32: by products of float32 some would be flushed."""
    values = random_floats(seed)
    scales = np.random.default_rng(seed).integers(0, 255, values.shape, np.uint8)
    scales[::2] = minifloat.ONE
    normal = np.where(np.abs(values) < TINY, 0 * values, values)
    quotients = np.ldexp(normal.astype(np.float64), minifloat.ONE - scales.astype(int))
    np.testing.assert_array_equal(encode(values, name, scales), expected_codes(quotients, name))


@every_element
def test_every_code_has_its_value_under_every_scale(name):
    """The last scale makes every code NaN."""
    codes = np.arange(2 ** ELEMENTS[name].bits, dtype=np.uint16)
    codes, scales = np.meshgrid(codes, np.arange(256, dtype=np.uint8))
    with np.errstate(over="ignore"):
        exact = np.ldexp(code_values(name)[codes], scales.astype(int) - minifloat.ONE)
        expected = np.where(np.abs(exact) < TINY, 0, exact).astype(np.float32)
    expected[minifloat.NAN_SCALE] = np.nan
    np.testing.assert_array_equal(decode(codes, name, scales), expected)


@every_element
@given(seed=seeds)
def test_scales_are_those_of_e8m0(name, seed):
    maxima = np.abs(random_floats(seed))
    maxima = np.concatenate([maxima, [0, 1, TINY, np.finfo(np.float32).max]]).astype(np.float32)
    floor_log2 = np.where(maxima > 0, np.frexp(maxima.astype(np.float64))[1] - 1, -1000)
    exponents = np.clip(floor_log2 - ELEMENTS[name].max_exponent, -127, 127)
    expected = [*np.ldexp(1.0, exponents), np.nan, np.nan]
    ours = np.asarray(_block_scales(np.append(maxima, np.float32([np.nan, np.inf])), name))
    assert ours.dtype == np.uint8
    bytes_of = np.array(expected).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    np.testing.assert_array_equal(ours, bytes_of)
