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
    """Every byte string is the packing of some codes, so that no bit on the wire is wasted."""
    wire = np.random.default_rng(seed).integers(0, 256, ROWS * 32 * width, np.uint8)
    np.testing.assert_array_equal(pack(unpack(wire, width), width), wire)
    codes = random_codes(seed, width)
    packed = np.asarray(pack(codes, width))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, planes_of_page(codes, width))
    np.testing.assert_array_equal(unpack(packed, width), codes)
