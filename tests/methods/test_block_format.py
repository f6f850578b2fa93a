"""Messages of blocks give back what they hold, and a step is the smallest that covers its span."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiq_jax.methods import BlockFormat
from dynamiq_jax.methods._blockwise import covering_step, rows_per_chunk
from tests.support import blocks_oracle

ROWS = 3
seeds = st.integers(0, 2**32 - 1)
covering = jax.jit(covering_step, static_argnums=1)
pack = jax.jit(BlockFormat.pack, static_argnums=0)
unpack = jax.jit(BlockFormat.unpack, static_argnums=0)
FORMATS = (
    BlockFormat(bits=16, block=32, side_bytes=(2,)),
    BlockFormat(bits=15, block=32, side_bytes=(1,)),
    BlockFormat(bits=5, block=64, side_bytes=(2, 2, 1)),
    BlockFormat(bits=3, block=256, side_bytes=(1, 2)),
)


def value(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("layout", FORMATS)
@given(seed=seeds)
def test_a_message_holds_codes_and_sides_and_nothing_else(layout, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**layout.bits, (ROWS, 256), np.uint16)
    shape = (ROWS, 256 // layout.block)
    dtypes = [{1: np.uint8, 2: np.uint16}[count] for count in layout.side_bytes]
    sides = [rng.integers(0, np.iinfo(d).max, shape, d, endpoint=True) for d in dtypes]
    message = np.asarray(pack(layout, codes, *sides))
    np.testing.assert_array_equal(message, blocks_oracle.payload(codes, layout.bits, *sides))
    sizes = [layout.bits * 256 // 8, *(count * shape[1] for count in layout.side_bytes)]
    assert message.size == ROWS * layout.row_bytes == ROWS * sum(sizes)
    for found, expected in zip(unpack(layout, message), (codes, *sides), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_rows_of_a_chunk():
    assert [rows_per_chunk(size, 8) for size in (1, 2048, 2049, 4096, 4097)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("levels", (1, 3, 7, 31, 127, 255))
@given(seed=seeds)
def test_a_step_is_the_smallest_bfloat16_that_covers_its_span(levels, seed):
    spans = np.exp2(np.random.default_rng(seed).uniform(-126, 126.9, 64)).astype(np.float32)
    bits = np.asarray(covering(spans, levels))
    assert bits.dtype == np.uint16
    step = value(bits)
    assert np.all(levels * step >= spans)
    assert np.all((levels * value(bits - 1) < spans) | (bits == 0x80))
    np.testing.assert_array_equal(step, blocks_oracle.covering_step(spans, levels))


@pytest.mark.parametrize("levels", (1, 3, 7, 15, 31, 63, 127, 255))
def test_a_span_of_whole_steps_keeps_its_step(levels):
    """And one of a unit of float32 more does not: every significand, and all spans close by."""
    spans = (levels * np.arange(128, 256)).astype(np.float32)
    nudges = np.arange(-6, 7, dtype=np.int32)[:, None]
    spans = (spans.view(np.int32) + nudges).view(np.float32)
    step = value(covering(spans, levels))
    np.testing.assert_array_equal(step[6], np.arange(128, 256))
    np.testing.assert_array_equal(step, blocks_oracle.covering_step(spans, levels))


def test_nothing_is_covered_by_nothing():
    assert np.asarray(covering(np.zeros(5, np.float32), 7)).tolist() == [0] * 5
