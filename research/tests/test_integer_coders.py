"""Codes of integers: lossless where they fit, told where they do not, and as short as promised."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq_research.entropy_coded import rans
from dynamiq_research.entropy_coded.integer_coders import (
    CoarseCoder,
    PatchedCoder,
    PlainCoder,
    ordinals,
)
from dynamiq_research.entropy_coded.rans import RansCoder

ROWS, BLOCK = 64, 1024
SIZE = ROWS * 256
DEVIATIONS = (0.3, 1.0, 2.8, 7.0, 22.0, 127.0, 2000.0)
CODERS = {
    **{f"rans of {d}": RansCoder.of_normal(ROWS, BLOCK, d) for d in DEVIATIONS},
    **{f"patched of {d}": PatchedCoder.of_normal(ROWS, d, 16) for d in DEVIATIONS},
    "plain": PlainCoder(rows=ROWS, width=13),
}


def normal(seed: int, deviation: float, rows: int = ROWS) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, deviation, (rows, 256))
    return np.rint(values).astype(np.int16)


@functools.cache
def functions(coder):
    return jax.jit(coder.encode), jax.jit(coder.decode)


def round_trip(coder, integers: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return how full the body is, the body, and the decoded integers."""
    encode, decode = functions(coder)
    body, filled = encode(integers)
    assert body.shape == (coder.num_bytes,) and body.dtype == jnp.uint8
    return float(filled), np.asarray(body), np.asarray(decode(body))


@pytest.mark.parametrize("kind", ("rans", "patched"))
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_integers_that_were_expected_fit_and_come_back(kind, deviation):
    coder = CODERS[f"{kind} of {deviation}"]
    for seed in range(8):
        integers = normal(seed, deviation)
        filled, _, decoded = round_trip(coder, integers)
        assert (0.85 if kind == "rans" else -1) < filled <= 1
        np.testing.assert_array_equal(decoded, integers)


@pytest.mark.parametrize("name", CODERS)
@settings(max_examples=8)
@given(seed=st.integers(0, 999), share=st.floats(0, 2), loud=st.floats(0, 1))
def test_whatever_fits_comes_back(name, seed, share, loud):
    """Blocks of other deviations than expected, spikes, and constants."""
    coder = CODERS[name]
    expected = float(name.split()[-1]) if name != "plain" else 500.0
    integers = normal(seed, share * expected)
    integers[: round(loud * 8)] = normal(seed + 1, 2 * expected)[0]
    integers[-4:] = seed - 500 if name == "plain" else 0
    filled, _, decoded = round_trip(coder, np.clip(integers, -4096, 4095))
    if filled <= 1:
        np.testing.assert_array_equal(decoded, np.clip(integers, -4096, 4095))
    else:
        assert share > 0.9 or loud > 0


@pytest.mark.parametrize("deviation", (1.0, 22.0))
@pytest.mark.parametrize("kind", ("rans", "patched"))
def test_what_does_not_fit_is_told(kind, deviation):
    coder = CODERS[f"{kind} of {deviation}"]
    assert round_trip(coder, normal(0, 1.3 * deviation))[0] > 1
    beyond = normal(0, 0.5 * deviation)
    beyond[5, 7] = 32767
    filled, _, decoded = round_trip(coder, beyond)
    assert filled > 1 or (kind == "patched" and np.array_equal(decoded, beyond))


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_messages_are_close_to_the_entropy(deviation):
    """Of messages with 131,072 integers: 2 % above it, and 1/16 bit for the lanes. A list costs up
    to a bit.
    """
    rows = 512
    values, counts = np.unique(normal(0, deviation, rows), return_counts=True)
    share = counts / counts.sum()
    entropy = -(share * np.log2(share)).sum()
    assert len(values) > 2
    size = rows * 256
    coded = 8 * RansCoder.of_normal(rows, 2**14, deviation).num_bytes / size
    assert entropy < coded < 1.02 * entropy + 0.11
    patched = 8 * PatchedCoder.of_normal(rows, deviation, 16).num_bytes / size
    assert coded < patched < max(2.2, entropy + 1)


# ------------------------------------------------------------------------------------------- rANS


def parts_of(coder: RansCoder, body: np.ndarray):
    ends = np.cumsum([2 * coder.words, 4 * coder.lanes, coder.size // coder.block])
    words, states, tables, low = np.split(body, ends)
    return words.view("<u2"), states.view("<u4"), tables, low


@pytest.mark.parametrize("deviation", (0.3, 2.8, 22.0))
def test_the_stream_is_that_of_the_textbook(deviation):
    """A decoder of one symbol after the other, in Python's integers, on the published formulas."""
    coder, integers = CODERS[f"rans of {deviation}"], normal(3, deviation)
    _, body, _ = round_trip(coder, integers)
    words, states, tables, _ = parts_of(coder, body)
    frequencies = rans._frequencies(min(coder.shift, 3)).astype(int)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    states, read = [int(x) for x in states], 0
    symbols = (integers >> coder.shift).reshape(-1, coder.lanes) + 32
    for step, expected in enumerate(symbols):
        table = tables[step * coder.lanes // coder.block]
        for lane in range(coder.lanes):
            slot = states[lane] % 4096
            symbol = int(np.searchsorted(starts[table], slot, side="right")) - 1
            assert symbol == expected[lane]
            x = frequencies[table][symbol] * (states[lane] // 4096) + slot - starts[table][symbol]
            if x < 2**16:
                x, read = x * 2**16 + int(words[read]), read + 1
            states[lane] = x
    assert set(states) == {2**16}  # where coding began
    assert not words[read:].any()


@pytest.mark.parametrize("deviation", (1.0, 7.0))
def test_the_length_is_that_of_one_large_integer(deviation):
    """Asymmetric numerals without renormalization: the state is as long as the message must be."""
    coder, integers = CODERS[f"rans of {deviation}"], normal(4, deviation)
    _, body, _ = round_trip(coder, integers)
    words, _, tables, _ = parts_of(coder, body)
    frequencies = rans._frequencies(min(coder.shift, 3)).astype(int)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    state = 1
    symbols = ((integers >> coder.shift) + 32).reshape(-1, coder.block)
    for block, table in zip(symbols, tables, strict=True):
        for symbol in block:
            f, c = int(frequencies[table][symbol]), int(starts[table][symbol])
            state = (state // f) * 4096 + state % f + c
    used = 16 * np.flatnonzero(words)[-1] + 16
    # A lane starts with 16 bits of its state, and ends with up to 32.
    assert -16 * coder.lanes - 64 < used - state.bit_length() < 16 * coder.lanes + 64


def test_every_block_has_the_table_of_its_own_deviation():
    coder = CODERS["rans of 22.0"]
    each = 22.0 / 2.0 ** np.array([0, 1, 2, 3] * 4)
    blocks = np.random.default_rng(0).normal(0, 1, (16, BLOCK)) * each[:, None]
    integers = np.rint(blocks).astype(np.int16).reshape(ROWS, 256)
    _, body, decoded = round_trip(coder, integers)
    np.testing.assert_array_equal(decoded, integers)
    _, _, tables, _ = parts_of(coder, body)
    np.testing.assert_allclose(np.diff(tables[:4].astype(int)), -4, atol=1)  # quarters of an octave


@pytest.mark.parametrize("shift", range(4))
def test_tables_have_every_symbol_and_add_up(shift):
    frequencies = rans._frequencies(shift)
    assert (frequencies.sum(axis=1) == 4096).all()
    assert frequencies.min() == 1 and frequencies.max() <= 4095
    assert (np.diff(rans._limits(shift)) > 0).all()


@pytest.mark.parametrize("rows", (1, 2, 3, 37))
def test_small_messages(rows):
    coder = RansCoder.of_normal(rows, 256, 2.8)
    assert coder.lanes & (coder.lanes - 1) == 0 and coder.size >= 256 * coder.lanes
    integers = normal(rows, 2.8, rows)
    filled, _, decoded = round_trip(coder, integers)
    assert filled <= 1
    np.testing.assert_array_equal(decoded, integers)


# ------------------------------------------------------------------------------------ parts, coarse


@given(seed=st.integers(0, 999), share=st.floats(0, 1))
def test_ordinals_number_the_true_ones(seed, share):
    flags = np.random.default_rng(seed).random((5, 7)) < share
    places, count = ordinals(jnp.asarray(flags))
    assert int(count) == flags.sum()
    np.testing.assert_array_equal(np.asarray(places)[flags], np.arange(flags.sum()))


@pytest.mark.parametrize(("num_bytes", "width", "kept"), ((SIZE, 10, 8), (SIZE * 5 // 4, 10, 10)))
def test_the_coarse_code_takes_what_room_there_is(num_bytes, width, kept):
    coder = CoarseCoder.into(num_bytes, ROWS, width)
    assert (coder.plain.width, coder.dropped) == (kept, width - kept)
    integers = normal(0, 100.0).clip(-511, 511)
    noise = np.random.default_rng(1).random((32, ROWS, 256), np.float32) * 0.998 + 0.001
    coded = jax.jit(jax.vmap(lambda u: coder.decode(coder.encode(integers, u))))(noise)
    error = np.asarray(coded, float) - integers
    assert np.abs(error).max() < 2**coder.dropped
    if coder.dropped:
        # Uniform noise of a step: its variance is at most a quarter of the step's square.
        step = 2**coder.dropped
        assert abs(error.mean()) < 5 * step / 2 / math.sqrt(error.size)
        assert 0.1 < (error**2).mean() / step**2 < 0.25
    else:
        assert not error.any()
