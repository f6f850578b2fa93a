"""Flash Communication: the bits of an oracle, spikes that are kept, the bytes promised.

`test_methods.py` has what every method owes: replicas, NaN and Inf, errors of sums, bytes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_research import FlashCommunication
from tests.support import blocks_oracle
from tests.support.gradients import heavy_tailed, vnmse
from tests.support.workers import call_on

KEY = jax.random.key(0)
WIRE_WORKERS = 8
N, SIZE = 4, 16 * 256 - 7  # the last block is padded
seeds = st.integers(0, 2**32 - 1)
METHODS = (
    FlashCommunication(),
    FlashCommunication(code_bits=2),
    FlashCommunication(code_bits=8, block=256),
    FlashCommunication(spikes=False),
    FlashCommunication(code_bits=3, block=64, spikes=False),
)
methods = pytest.mark.parametrize(
    "method", METHODS, ids=lambda m: f"{m.code_bits}-{m.block}{'-spikes' * m.spikes}"
)
WITH_SPIKES = tuple(method for method in METHODS if method.spikes)


@functools.cache
def coder(method: FlashCommunication):
    """Return a function of values to a message and what it decodes to."""

    def code(values):
        codec = method.bind(values, call_on(values.size, 1), KEY)
        message = codec.compress(jnp.int32(0), 0)
        return message, codec.decompress(message[None])

    return jax.jit(code)


def code(method: FlashCommunication, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    message, decoded = coder(method)(values)
    return np.asarray(message), np.asarray(decoded)


def in_blocks(method: FlashCommunication, values: np.ndarray) -> np.ndarray:
    return np.pad(values, (0, -values.size % 256)).reshape(-1, method.block)


def places(method: FlashCommunication, values: np.ndarray) -> np.ndarray:
    """Of the last smallest and the first largest value of every block: [blocks, 2]."""
    blocks = in_blocks(method, values)
    lows = method.block - 1 - np.argmin(blocks[:, ::-1], axis=1)
    return np.stack([lows, np.argmax(blocks, axis=1)], axis=1)


def grid(method: FlashCommunication, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Zero points and steps of every block: [blocks, 1]."""
    rest = in_blocks(method, values).astype(float)
    if method.spikes:
        np.put_along_axis(rest, places(method, values), np.nan, axis=1)
    zeros = blocks_oracle.bf16_below(np.nanmin(rest, axis=1, keepdims=True))
    largest = np.nanmax(rest, axis=1, keepdims=True)
    spans = (largest - zeros).astype(np.float32)
    return zeros, blocks_oracle.covering_step(spans, 2**method.code_bits - 1)


# ------------------------------------------------------------------------------------ the numbers


@methods
@given(seed=seeds, power=st.integers(-90, 120))
def test_values_are_those_of_the_oracle(method, seed, power):
    values = np.ldexp(heavy_tailed(seed, (SIZE,), scale=1.0) / np.float32(300), power)
    blocks, (zeros, steps) = in_blocks(method, values), grid(method, values)
    shifted = blocks - zeros.astype(np.float32)
    codes = np.clip(np.rint(shifted * blocks_oracle.inverse(steps)), 0, 2**method.code_bits - 1)
    expected = (zeros + codes * steps).astype(np.float32)
    if method.spikes:
        where = places(method, values)
        spikes = np.take_along_axis(blocks, where, axis=1)
        np.put_along_axis(expected, where, np.asarray(spikes, jnp.bfloat16).astype(float), axis=1)
    np.testing.assert_array_equal(code(method, values)[1], expected.ravel()[:SIZE])


def test_the_message_is_that_of_the_docstring():
    """Codes, zero points, steps, smallest and largest values, and their places."""
    method = FlashCommunication()
    values = heavy_tailed(0, (SIZE,))
    blocks, (zeros, steps), where = (
        in_blocks(method, values),
        grid(method, values),
        places(method, values),
    )
    shifted = blocks - zeros.astype(np.float32)
    codes = np.clip(np.rint(shifted * blocks_oracle.inverse(steps)), 0, 31)
    spikes = np.asarray(np.take_along_axis(blocks, where, axis=1), jnp.bfloat16).astype(np.float32)
    sides = [blocks_oracle.bf16_bits(part) for part in (zeros, steps, spikes[:, 0], spikes[:, 1])]
    sides += [where[:, column].astype(np.uint8) for column in (0, 1)]
    expected = blocks_oracle.payload(codes.reshape(-1, 256), 5, *sides)
    message = code(method, values)[0]
    assert message.size == expected.size == 16 * 256 * 7.5 / 8
    np.testing.assert_array_equal(message, expected)


@methods
def test_the_error_is_that_of_half_a_step(method):
    errors = []
    for seed in range(4):
        values = np.random.default_rng(seed).uniform(-1, 1, SIZE).astype(np.float32)
        error = in_blocks(method, code(method, values)[1].astype(float) - values)
        error = (error / grid(method, values)[1]).ravel()
        # Spikes have none.
        errors.append(np.delete(error, _flat_places(method, values) if method.spikes else []))
    error = np.concatenate(errors)
    assert 0.49 < np.abs(error).max() <= 0.5 + 1e-4
    assert np.mean(error**2) == pytest.approx(1 / 12, rel=0.08)


@pytest.mark.parametrize("method", WITH_SPIKES, ids=str)
@given(seed=seeds)
def test_spikes_are_kept_as_bfloat16(method, seed):
    values = heavy_tailed(seed, (SIZE,))
    where = _flat_places(method, values)
    assert len(set(where)) == 2 * 16 * 256 // method.block
    where = where[where < SIZE]
    kept = code(method, values)[1][where]
    np.testing.assert_array_equal(kept, np.asarray(values[where], jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("bits", (2, 4))
def test_spikes_pay_where_a_value_stands_out(bits):
    values = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    values[5::32] *= 50
    errors = [
        vnmse(code(FlashCommunication(code_bits=bits, spikes=spikes), values)[1], values)
        for spikes in (True, False)
    ]
    assert 0 < errors[0] < errors[1] / 20


def _flat_places(method: FlashCommunication, values: np.ndarray) -> np.ndarray:
    where = places(method, values)
    return (where + method.block * np.arange(len(where))[:, None]).ravel()


# -------------------------------------------------------------------------------------- the edges


@methods
def test_blocks_of_one_value_come_back_as_the_bfloat16_that_they_are(method):
    values = np.repeat(np.float32([-3.0, 1e-30, 2.0**100, 0.0]), 4 * 256)[:SIZE]
    expected = np.asarray(values, jnp.bfloat16).astype(np.float32)
    decoded = code(method, values)[1]
    np.testing.assert_allclose(decoded, expected, rtol=2**-7)  # 1e-30 lies between two
    exact = values != np.float32(1e-30)
    np.testing.assert_array_equal(decoded[exact], expected[exact])


@methods
@pytest.mark.parametrize("bad", (np.nan, -np.nan, np.inf, -np.inf, 1e38, -1e38))
def test_what_is_not_finite_surfaces_in_its_block_alone(method, bad):
    clean = heavy_tailed(0, (SIZE,))
    values = clean.copy()
    values[300] = bad
    decoded, expected = code(method, values)[1], code(method, clean)[1]
    block = np.arange(SIZE) // method.block == 300 // method.block
    assert np.isnan(decoded[block]).all()
    np.testing.assert_array_equal(decoded[~block], expected[~block])


@methods
def test_two_values_that_are_not_finite_hide_no_other(method):
    """As spikes they would leave a block that looks finite."""
    values = heavy_tailed(0, (SIZE,))
    values[[300, 310]] = np.nan, -np.inf
    assert np.isnan(code(method, values)[1][300 // 32 * 32 : 300 // 32 * 32 + 32]).all()


# --------------------------------------------------------------------------------- over the wire


@pytest.mark.parametrize(
    ("method", "bits"),
    (
        (FlashCommunication(), 7.5),
        (FlashCommunication(spikes=False), 6.0),
        (FlashCommunication(code_bits=2), 4.5),
        (FlashCommunication(code_bits=4, block=128), 4.625),
        (FlashCommunication(code_bits=8, block=256, spikes=False), 8.125),
    ),
    ids=str,
)
def test_bits_are_those_promised(method, bits):
    tree = {"w": jax.ShapeDtypeStruct((WIRE_WORKERS * 512,), jnp.float32)}
    assert dq.wire_report(tree, WIRE_WORKERS, method=method).bits == bits


# ------------------------------------------------------------------------------------ the options


@pytest.mark.parametrize(
    ("options", "says"),
    (
        ({"code_bits": 9}, r"code_bits=9 is not possible\. Give an integer from 2 to 8\."),
        ({"code_bits": 4.5}, r"code_bits=4\.5 is not possible"),
        ({"block": 512}, r"block=512 is not possible\. Give one of \(32, 64, 128, 256\)\."),
        ({"spikes": "no"}, r"spikes='no' is not possible\. Give True or False\."),
    ),
)
def test_impossible_options(options, says):
    with pytest.raises(ValueError, match=says):
        FlashCommunication(**options)
