"""Packing is a permutation of bits: dense, invertible, and that of the wire format."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.codec import packing
from tests.support import oracle

ROWS = 3
CODE_WIDTHS = [width for width in packing.WIDTHS if width]
seeds = st.integers(0, 2**32 - 1)
every_width = pytest.mark.parametrize("width", CODE_WIDTHS)
few_examples = settings(max_examples=4)  # each has 768 random codes


@functools.partial(jax.jit, static_argnums=1)
def pack(codes, width):
    """The planes of `packing.pack`, one after the other."""
    return jnp.concatenate(packing.pack(codes, width))


@functools.partial(jax.jit, static_argnums=1)
def unpack(packed, width):
    return packing.unpack(packed, ROWS, width).reshape(ROWS, packing.SUPER_GROUP_SIZE)


def planes_of_page(codes: np.ndarray, width: int) -> np.ndarray:
    """Bytes of the page: plane by plane, and in a plane row by row."""
    rows = oracle.pack_codes(codes, width)
    return np.concatenate(
        [rows[:, 32 * low : 32 * (low + bits)].reshape(-1) for low, bits in oracle.planes(width)]
    )


def random_codes(seed: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**width, (ROWS, packing.SUPER_GROUP_SIZE), np.uint16)


def ones(values: np.ndarray) -> int:
    return int(np.bitwise_count(np.asarray(values)).sum())


def test_planes_are_those_of_the_page():
    for width in packing.WIDTHS:
        sizes = packing.planes(width)
        assert sum(sizes) == width
        assert list(sizes) == sorted(sizes, reverse=True)
        lows = np.cumsum((0, *sizes))[:-1]
        assert list(zip(lows, sizes, strict=True)) == oracle.planes(width)
        assert packing.row_bytes(width) == 32 * width


@every_width
@few_examples
@given(seed=seeds)
def test_bytes_are_those_of_the_oracle_and_codes_come_back(width, seed):
    codes = random_codes(seed, width)
    packed = np.asarray(pack(codes, width))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, planes_of_page(codes, width))
    np.testing.assert_array_equal(unpack(packed, width), codes)


@every_width
@few_examples
@given(seed=seeds)
def test_every_byte_string_is_the_packing_of_some_codes(width, seed):
    """With the test above: a bijection, so no bit on the wire is wasted."""
    wire = np.random.default_rng(seed).integers(0, 256, ROWS * 32 * width, np.uint8)
    np.testing.assert_array_equal(np.asarray(pack(unpack(wire, width), width)), wire)


@every_width
@few_examples
@given(seed=seeds, other=seeds)
def test_packing_moves_bits_and_changes_none(width, seed, other):
    a, b = random_codes(seed, width), random_codes(other, width)
    packed_a, packed_b = np.asarray(pack(a, width)), np.asarray(pack(b, width))
    np.testing.assert_array_equal(np.asarray(pack(a ^ b, width)), packed_a ^ packed_b)
    assert ones(packed_a) == ones(a)


@every_width
def test_every_bit_of_every_lane_has_its_own_place_in_its_own_row(width):
    places = []
    for bit in range(width):
        for lane in range(0, packing.SUPER_GROUP_SIZE, 37):
            codes = np.zeros((ROWS, packing.SUPER_GROUP_SIZE), np.uint16)
            codes[1, lane] = 1 << bit
            packed = np.asarray(pack(codes, width))
            assert ones(packed) == 1
            places.append(int(np.flatnonzero(np.unpackbits(packed))[0]))
            # The middle third of the plane that holds the bit.
            low, bits = next(p for p in oracle.planes(width) if p[0] <= bit < sum(p))
            at = places[-1] // 8 - ROWS * 32 * low
            assert 32 * bits <= at < 2 * 32 * bits
    assert len(set(places)) == len(places)
