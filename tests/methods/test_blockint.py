"""Block integers: the bits of an oracle, errors within half a step, the bytes promised.

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
from dynamiq_jax.methods import BlockInt
from tests.support import blocks_oracle
from tests.support.gradients import heavy_tailed, of_workers, vnmse
from tests.support.workers import call_on, simulated

KEY = jax.random.key(0)
WIRE_WORKERS = 8
N, SIZE = 4, 16 * 256 - 7  # the last block is padded
seeds = st.integers(0, 2**32 - 1)
METHODS = (BlockInt(), BlockInt(code_bits=2, block=64), BlockInt(code_bits=5), BlockInt.qgz())
STOCHASTIC = BlockInt(code_bits=4, rounding="stochastic")
methods = pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.code_bits}-{m.block}")


@functools.cache
def coder(method: BlockInt):
    """Return a function of (key, values, chunk, turn) to a message and what it decodes to."""

    def code(key, values, chunk, turn):
        codec = method.bind(jnp.tile(values, 2), call_on(2 * values.size, 2), key)
        message = codec.encode(jnp.pad(values, (0, -values.size % 256)), chunk, turn)
        return message, codec.decode(message, jnp.int32(0))[: values.size]

    return jax.jit(code)


def code(
    method: BlockInt, values: np.ndarray, key=KEY, chunk: int = 0, turn: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    message, decoded = coder(method)(key, values, chunk, turn)
    return np.asarray(message), np.asarray(decoded)


def top(method: BlockInt) -> int:
    return 2 ** (method.code_bits - 1) - 1


def in_blocks(method: BlockInt, values: np.ndarray) -> np.ndarray:
    return np.pad(values, (0, -values.size % 256)).reshape(-1, method.block)


def steps(method: BlockInt, values: np.ndarray) -> np.ndarray:
    """Of every block, [blocks, 1]."""
    maxima = np.abs(in_blocks(method, values)).max(axis=1, keepdims=True)
    return blocks_oracle.covering_step(maxima, top(method))


# ------------------------------------------------------------------------------------ the numbers


@methods
@given(seed=seeds, power=st.integers(-100, 120))
def test_message_and_values_are_those_of_the_oracle(method, seed, power):
    values = np.ldexp(heavy_tailed(seed, (SIZE,), scale=1.0) / np.float32(300), power)
    blocks, step = in_blocks(method, values), steps(method, values)
    whole = np.rint(blocks * blocks_oracle.inverse(step))
    codes = (whole + top(method)).reshape(-1, 256)
    message, decoded = code(method, values)
    bits = blocks_oracle.bf16_bits(step)
    np.testing.assert_array_equal(message, blocks_oracle.payload(codes, method.code_bits, bits))
    np.testing.assert_array_equal(decoded, (whole * step).ravel()[:SIZE].astype(np.float32))


@methods
def test_the_error_is_that_of_half_a_step(method):
    values = np.random.default_rng(0).uniform(-1, 1, SIZE).astype(np.float32)
    error = in_blocks(method, code(method, values)[1].astype(float) - values)
    error = error / steps(method, values)
    assert 0.49 < np.abs(error).max() <= 0.5 + 1e-4
    assert np.mean(error**2) == pytest.approx(1 / 12, rel=0.08)


@given(seed=seeds)
def test_what_was_decoded_is_coded_without_further_error(seed):
    """At 8 bits the largest code of a block may be 126, which 126 smaller steps cover too."""
    for bits in (2, 5, 7):
        method = BlockInt(code_bits=bits)
        decoded = code(method, heavy_tailed(seed, (SIZE,)))[1]
        assert np.any(decoded)
        np.testing.assert_array_equal(code(method, decoded)[1], decoded)


def test_stochastic_rounding_is_unbiased():
    values = np.random.default_rng(0).uniform(-1, 1, SIZE).astype(np.float32)
    step, keys = steps(STOCHASTIC, values), 48
    results = np.stack([code(STOCHASTIC, values, jax.random.key(k))[1] for k in range(keys)])
    errors = (results.astype(float) - values) / np.repeat(step, STOCHASTIC.block)[:SIZE]
    assert 0.9 < np.abs(errors).max() <= 1 + 1e-4
    assert np.mean(errors**2) == pytest.approx(1 / 6, rel=0.05)
    assert np.mean(errors.mean(axis=0) ** 2) == pytest.approx(1 / 6 / keys, rel=0.15)
    assert abs(np.mean(errors)) < 4 * np.sqrt(1 / 6 / errors.size)


def test_every_compression_has_noise_of_its_own():
    values = np.random.default_rng(0).uniform(-1, 1, SIZE).astype(np.float32)
    places = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    errors = [code(STOCHASTIC, values, chunk=c, turn=t)[1] - values for c, t in places]
    correlations = np.corrcoef(errors) - np.eye(len(places))
    assert 0 < np.abs(correlations).max() < 5 / np.sqrt(values.size)


# -------------------------------------------------------------------------------------- the edges


@pytest.mark.parametrize("method", (*METHODS, STOCHASTIC), ids=str)
def test_zeros_stay_zeros(method):
    values = heavy_tailed(0, (SIZE,))
    values[::3] = 0
    values[256:512] = 0
    decoded = code(method, values)[1]
    assert np.any(decoded)
    assert not np.any(decoded[values == 0]) and not np.any(np.signbit(decoded[256:512]))


@pytest.mark.parametrize("method", (*METHODS, STOCHASTIC), ids=str)
def test_what_is_not_finite_surfaces_in_its_block_alone(method):
    clean = heavy_tailed(0, (SIZE,))
    values, places = clean.copy(), np.array([300, 700, 1100, 1500, 1900])
    values[places] = np.nan, -np.nan, np.inf, -np.inf, 1e38
    decoded, expected = code(method, values)[1], code(method, clean)[1]
    lost = np.isin(np.arange(SIZE) // method.block, places // method.block)
    np.testing.assert_array_equal(decoded, np.where(lost, np.nan, expected))


@methods
def test_the_smallest_and_the_largest_numbers_keep_a_step(method):
    """Most scales would be subnormal, which backends flush: they are the smallest normal one."""
    values = np.full(SIZE, 1.25 * 2.0**-126, np.float32)
    expected = np.float32(1.25 if top(method) == 1 else 1) * np.float32(2.0**-126)
    np.testing.assert_array_equal(code(method, values)[1], expected)
    largest = np.full(SIZE, 2.0**126, np.float32)
    np.testing.assert_allclose(code(method, largest)[1], largest, rtol=1e-2)


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_noise_lifts_no_value_above_the_largest_integer(bits):
    """A value of as many whole steps, of every significand: its product with the reciprocal of the
    step may be rounded up, and the largest noise would take it to the next integer, which has no
    code.
    """
    method = BlockInt(code_bits=bits, rounding="stochastic")
    recode = jax.jit(lambda *of_rows: method.decode_rows(*method.encode_rows(*of_rows)))
    largest = np.repeat(top(method) * np.arange(128, 256), method.block).reshape(-1, 256)
    for sign in (1, -1):
        rows = (sign * largest).astype(np.float32)
        for noise in (2.0**-17, 1 - 2.0**-17):  # the extremes of 16 bits
            decoded = sign * np.asarray(recode(rows, np.full(rows.shape, noise, np.float32)))
            steps = largest / top(method)
            assert ((largest - steps <= decoded) & (decoded <= largest)).all()


# --------------------------------------------------------------------------------- over the wire


def test_stochastic_sums_are_unbiased():
    """Noise of the hops of a sum is independent."""
    g, keys = of_workers(0, N, 5000), 16
    truth = g.sum(axis=0, dtype=np.float64)
    run = simulated(lambda key, g: dq.psum(g, "data", key=key, method=STOCHASTIC))
    results = [np.asarray(run(jax.random.key(k), g)[0], float) for k in range(keys)]
    single = np.mean([vnmse(result, truth) for result in results])
    assert 1e-2 < single < 0.1
    assert 0.85 / keys < vnmse(np.mean(results, axis=0), truth) / single < 1.15 / keys


@pytest.mark.parametrize(
    ("method", "bits"),
    (
        (BlockInt(), 8.5),
        (BlockInt(code_bits=6), 6.5),
        (BlockInt(code_bits=4, block=64), 4.25),
        (BlockInt.qgz(), 4.125),
        (BlockInt.equarx(), 8.125),
        (BlockInt(code_bits=3, block=256), 3.0625),
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
        ({"code_bits": 1}, r"code_bits=1 is not possible\. Give an integer from 2 to 8\."),
        ({"code_bits": 9}, r"code_bits=9 is not possible"),
        ({"code_bits": 4.0}, r"code_bits=4\.0 is not possible"),
        ({"block": 64.0}, r"block=64\.0 is not possible"),
        ({"block": 16}, r"block=16 is not possible\. Give one of \(32, 64, 128, 256\)\."),
        ({"rounding": "correlated"}, r"rounding='correlated' .*possible\. Give one of \('near"),
    ),
)
def test_impossible_options(options, says):
    with pytest.raises(ValueError, match=says):
        BlockInt(**options)
