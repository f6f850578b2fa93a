"""Codes of rows of different widths to bit planes and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.codec import bit_planes, make_places
from tests.support import oracle

ROWS = 24
seeds = st.integers(0, 2**32 - 1)


def some_widths(rng: np.random.Generator, widest: int) -> np.ndarray:
    """Widths of places, not increasing."""
    return np.sort(rng.choice((0, *range(2, widest + 1)), ROWS))[::-1].astype(np.int32)


def starts_of(widths: np.ndarray) -> np.ndarray:
    plane_rows = (widths[:, None] > np.arange(16)).sum(axis=0)
    return make_places(jnp.zeros(ROWS, jnp.int32), jnp.asarray(plane_rows, jnp.int32)).starts


@functools.partial(jax.jit, static_argnames="pack")
def pack_blocks(units, codes, widths, starts, pack=bit_planes.pack):
    """Pack in blocks of 8 rows, the last one first."""
    for first in (16, 0, 8):
        block = slice(first, first + 8)
        units = pack(units, codes[block], widths[block], starts, first)
    return units


@jax.jit
def unpack_blocks(units, widths, starts):
    blocks = [
        bit_planes.unpack(units, widths[first : first + 8], starts, first) for first in (0, 8, 16)
    ]
    return jnp.concatenate(blocks).reshape(ROWS, 256)


@pytest.mark.parametrize("pack", (bit_planes.pack_one_by_one, bit_planes.pack_at_once))
@pytest.mark.parametrize("widest", (2, 8, 16))
@settings(max_examples=8)
@given(seed=seeds)
def test_planes_are_those_of_the_oracle(widest, pack, seed):
    rng = np.random.default_rng(seed)
    widths = some_widths(rng, widest)
    codes = (rng.integers(0, 2**16, (ROWS, 256)) & (2 ** widths[:, None] - 1)).astype(np.uint16)
    scales = np.zeros((ROWS, 8), np.uint8), np.zeros(ROWS, np.uint16)
    units = int(widths.sum())
    expected = oracle.pack_message(codes, *scales, widths, units)[: 32 * units].reshape(-1, 32)

    # What lies behind the planes stays, whatever the blocks. One size of all examples: each would
    # be compiled.
    empty = rng.integers(0, 256, (16 * ROWS + 8, 32), np.uint8)
    packed = np.asarray(pack_blocks(empty, codes, widths, starts_of(widths), pack))
    np.testing.assert_array_equal(packed[:units], expected)
    np.testing.assert_array_equal(packed[units:], empty[units:])
    np.testing.assert_array_equal(unpack_blocks(packed, widths, starts_of(widths)), codes)


def test_bits_that_a_row_lacks_are_not_sent():
    """An encoder may leave any bits above a code."""
    widths = np.full(ROWS, 3, np.int32)
    codes = np.full((ROWS, 256), 0xFFFF, np.uint16)
    empty = np.zeros((3 * ROWS + 8, 32), np.uint8)
    packed = pack_blocks(empty, codes, widths, starts_of(widths))
    assert np.all(np.asarray(unpack_blocks(packed, widths, starts_of(widths))) == 7)


@pytest.mark.parametrize("dtype", (np.uint8, np.uint16, np.uint32))
def test_a_transposition_swaps_words_and_bits(dtype):
    words = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (8, 24), dtype, endpoint=True)
    swapped = np.asarray(bit_planes.transpose(list(jnp.asarray(words))))
    bits = np.unpackbits(words.view(np.uint8).reshape(8, -1, 1), axis=2, bitorder="little")
    expected = np.packbits(bits.transpose(2, 1, 0), axis=2, bitorder="little")
    of_bytes = np.ascontiguousarray(expected[:, :, 0])
    np.testing.assert_array_equal(swapped, of_bytes.view(dtype))
    np.testing.assert_array_equal(bit_planes.transpose(list(swapped)), words)
