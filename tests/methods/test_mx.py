"""Microscaling methods: the bytes of the standard, the errors of rounding alone, the bytes
promised.

`test_methods.py` has what every method owes: replicas, NaN and Inf, errors of sums, bytes.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax.methods import MXFP4, MXFP6, MXFP8, MXINT8
from tests.methods.test_minifloat import LARGEST, code_values, expected_codes
from tests.support import blocks_oracle
from tests.support.gradients import of_workers
from tests.support.workers import call_on, simulated

KEY = jax.random.key(0)
SIZE = 4096
METHODS = {
    "e4m3": MXFP8(),
    "e5m2": MXFP8(element="e5m2"),
    "e2m3": MXFP6(),
    "e3m2": MXFP6(element="e3m2"),
    "e2m1": MXFP4(),
    "int8": MXINT8(),
}
every_format = pytest.mark.parametrize("name", METHODS)
# With and without codes for Inf, widest and narrowest, both ways to write a sign.
some_formats = pytest.mark.parametrize("name", ("e5m2", "e2m1", "int8"))


@functools.cache
def psum(name: str):
    method = METHODS[name]
    return simulated(lambda key, g: dq.psum(g, "data", key=key, method=method))


def encode_blocks(rows: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The standard, in float64: float32 [rows, 256] to codes uint8 and scale bytes [rows, 8]."""
    blocks = rows.reshape(len(rows), 8, 32).astype(np.float64)
    amax = np.abs(blocks).max(axis=2)
    floor_log2 = np.where(amax > 0, np.frexp(amax)[1] - 1, -1000)
    emax = np.frexp(LARGEST[name])[1] - 1
    exponents = np.clip(floor_log2 - emax, -127, 127)
    codes = expected_codes(np.ldexp(blocks, -exponents[:, :, None]), name)
    scales = np.ldexp(1.0, exponents).astype(ml_dtypes.float8_e8m0fnu)
    return codes.reshape(rows.shape), scales.view(np.uint8)


def decode_blocks(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """Inverse of `encode_blocks`: float64 [rows, 256]."""
    values = code_values(name)[codes].reshape(len(codes), 8, 32)
    steps = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return (values * steps[:, :, None]).reshape(codes.shape)


def rows_of(seed: int, num_rows: int = 3) -> np.ndarray:
    """Blocks anywhere in the normal range of float32, a block of zeros among them."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((num_rows * 8, 32)) * np.exp2(rng.integers(-100, 125, (24, 1)))
    blocks[rng.integers(len(blocks))] = 0
    return blocks.astype(np.float32).reshape(num_rows, 256)


# ------------------------------------------------------------------------------- on the wire


@functools.cache
def message_of(name: str):
    """Return a function of values to the message of the first of two chunks."""

    def message(flat):
        return METHODS[name].bind(flat, call_on(flat.size, 2), KEY).compress(jnp.int32(0), 0)

    return jax.jit(message)


def expected_message(rows: np.ndarray, name: str) -> np.ndarray:
    bits = METHODS[name].format.bits
    codes, scales = encode_blocks(rows, name)
    return blocks_oracle.payload(codes, bits, scales)


@every_format
@given(seed=st.integers(0, 2**32 - 1))
def test_a_message_is_the_codes_and_scales_of_the_standard(name, seed):
    rows = rows_of(seed)
    message = np.asarray(message_of(name)(np.concatenate([rows, rows]).reshape(-1)))
    assert message.dtype == np.uint8
    np.testing.assert_array_equal(message, expected_message(rows, name))


def test_a_message_of_several_blocks_of_rows_is_as_any_other():
    """A CPU walks through long chunks in steps, the last of which goes back over some rows."""
    rows = of_workers(0, 1, 1200 * 256).reshape(1200, 256)
    message = message_of("e2m3")(np.concatenate([rows, rows]).reshape(-1))
    np.testing.assert_array_equal(message, expected_message(rows, "e2m3"))


@some_formats
def test_two_workers_get_the_sum_that_the_standard_gives(name):
    """Encoded, added in float32, encoded again: nothing else happens on the way."""
    values = of_workers(0, 2, 1024)
    first, second = (decode_blocks(*encode_blocks(v.reshape(4, 256), name), name) for v in values)
    # Chunk c starts at the other worker and ends at worker c.
    received = np.concatenate([second[:2], first[2:]]).astype(np.float32)
    own = np.concatenate([values[0, :512], values[1, 512:]]).reshape(4, 256)
    expected = decode_blocks(*encode_blocks(received + own, name), name).reshape(-1)
    np.testing.assert_array_equal(psum(name)(KEY, values)[0], expected.astype(np.float32))


# ------------------------------------------------------------------------------------- errors


@pytest.mark.sampled(2)
@some_formats
def test_exponents_of_blocks_do_not_change_errors(name):
    """No absolute epsilon: gradients of 1e-30 are those of one, and a block has a scale for
    itself.
    """
    values = of_workers(2, 4, SIZE)
    values = np.where(np.abs(values) < 1e-6, 0, values)
    powers = np.repeat(np.random.default_rng(0).integers(-80, 80, SIZE // 32), 32)
    scaled = np.ldexp(values, powers).astype(np.float32)
    expected = np.ldexp(np.asarray(psum(name)(KEY, values)[0]), powers)
    np.testing.assert_array_equal(psum(name)(KEY, scaled)[0], expected)
    assert np.any(expected)


# -------------------------------------------------------------------------------- what surfaces


@some_formats
def test_the_whole_range_keeps_its_precision_and_sums_beyond_it_are_not_finite(name):
    """Sums next to both ends of float32 are off by no more than those of ones. One block is not
    finite, and no other follows it.
    """
    kept = np.repeat(np.float32([2.0**-120, 1, 2.0**120]), SIZE // 4)
    values = np.tile(np.append(kept, np.full(SIZE // 4, 0.9 * 2.0**127, np.float32)), (4, 1))
    values[1, 777] = np.nan
    result = np.asarray(psum(name)(KEY, values))
    expected = np.where(np.arange(kept.size) // 32 == 777 // 32, np.nan, 4 * kept)
    np.testing.assert_array_equal(result[:, : kept.size], np.tile(expected, (4, 1)))
    assert not np.isfinite(result[:, kept.size :]).any()


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(("cls", "element"), ((MXFP8, "e3m2"), (MXFP6, "e4m3"), (MXFP8, None)))
def test_impossible_fields(cls, element):
    with pytest.raises(ValueError, match=rf"element={element!r} is not possible\. Give one of "):
        cls(element=element)
