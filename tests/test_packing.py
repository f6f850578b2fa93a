"""Packing is a permutation of bits: dense, invertible, and the one of the wire format."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamiq_jax.codec import packing
from hypothesis import given
from hypothesis import strategies as st

from tests.support import oracle

ROWS = 3
CODE_WIDTHS = [width for width in packing.WIDTHS if width]
seeds = st.integers(0, 2**32 - 1)


@functools.partial(jax.jit, static_argnums=1)
def pack(codes, width):
    """Planes of `packing.pack`, one beside the other."""
    return jnp.concatenate(packing.pack(codes, width), axis=1)


@functools.partial(jax.jit, static_argnums=1)
def unpack(packed, width):
    """Codes of planes that lie one beside the other."""
    sizes = [packing.row_bytes(bits) for bits in packing.planes(width)]
    planes = jnp.split(packed, np.cumsum(sizes)[:-1], axis=1)
    return packing.unpack(tuple(planes), len(packed), width).reshape(-1, packing.SUPER_GROUP_SIZE)


def random_codes(seed: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**width, (ROWS, packing.SUPER_GROUP_SIZE), np.uint16)


def random_bytes(seed: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (ROWS, 32 * width), np.uint8)


def ones(values: np.ndarray) -> int:
    return int(np.bitwise_count(np.asarray(values)).sum())


@pytest.mark.parametrize("width", packing.WIDTHS)
def test_planes_are_those_of_the_page(width):
    sizes = packing.planes(width)
    assert sum(sizes) == width
    assert list(sizes) == sorted(sizes, reverse=True)
    lows = np.cumsum((0, *sizes))[:-1]
    assert list(zip(lows, sizes, strict=True)) == oracle.planes(width)
    assert packing.row_bytes(width) == 32 * width


@pytest.mark.parametrize("width", CODE_WIDTHS)
@given(seed=seeds)
def test_bytes_are_those_of_the_oracle(width, seed):
    codes = random_codes(seed, width)
    packed = np.asarray(pack(codes, width))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, oracle.pack_codes(codes, width))


@pytest.mark.parametrize("width", CODE_WIDTHS)
@given(seed=seeds)
def test_codes_come_back(width, seed):
    codes = random_codes(seed, width)
    np.testing.assert_array_equal(unpack(pack(codes, width), width), codes)


@pytest.mark.parametrize("width", CODE_WIDTHS)
@given(seed=seeds)
def test_every_byte_string_is_the_packing_of_some_codes(width, seed):
    """With the test above: a bijection, so no bit on the wire is wasted."""
    wire = random_bytes(seed, width)
    np.testing.assert_array_equal(np.asarray(pack(unpack(wire, width), width)), wire)


@pytest.mark.parametrize("width", CODE_WIDTHS)
@given(seed=seeds, other=seeds)
def test_packing_moves_bits_and_changes_none(width, seed, other):
    a, b = random_codes(seed, width), random_codes(other, width)
    packed_a, packed_b = np.asarray(pack(a, width)), np.asarray(pack(b, width))
    np.testing.assert_array_equal(np.asarray(pack(a ^ b, width)), packed_a ^ packed_b)
    assert ones(packed_a) == ones(a)


@pytest.mark.parametrize("width", CODE_WIDTHS)
def test_every_bit_of_every_lane_has_its_own_place_in_its_own_row(width):
    places = []
    for bit in range(width):
        for lane in range(0, packing.SUPER_GROUP_SIZE, 37):
            codes = np.zeros((ROWS, packing.SUPER_GROUP_SIZE), np.uint16)
            codes[1, lane] = 1 << bit
            packed = np.asarray(pack(codes, width))
            assert ones(packed) == 1
            assert ones(packed[1]) == 1
            places.append(int(np.flatnonzero(np.unpackbits(packed[1]))[0]))
    assert len(set(places)) == len(places)
