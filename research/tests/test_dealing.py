"""Rows of a bucket that are dealt to the shards of pipelined steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from dynamiq_research.pipelined.dealing import ShiftedDealing


def dealt(dealing, vector):
    return np.asarray(dealing.deal(jnp.asarray(vector)))


@pytest.mark.parametrize("pieces, rows", ((1, 3), (2, 5), (3, 4), (8, 7)))
def test_all_pieces_of_a_vector_and_back(pieces, rows):
    """`places` has the coordinates of the pieces, and zeros are where there are none."""
    size = 4 * pieces * rows - 3
    dealing = ShiftedDealing(size, pieces, granule=4)
    assert dealing.size == 4 * rows
    vector = np.arange(1, size + 1, dtype=np.int32)
    taken = dealt(dealing, vector)
    places = np.asarray(dealing.places(jnp.arange(pieces, dtype=jnp.int32)))
    np.testing.assert_array_equal(np.where(places < size, places + 1, 0), taken)
    np.testing.assert_array_equal(dealing.undeal(jnp.asarray(taken)), vector)


def test_a_turn_has_neighboring_rows_whose_pieces_are_shifted():
    vector = np.arange(1, 256 * 12 + 1, dtype=np.float32)
    shifted = dealt(ShiftedDealing(vector.size, 3, 256), vector).reshape(3, -1, 256)
    plain = vector.reshape(-1, 3, 256)  # turns of three pieces
    assert np.any(shifted.swapaxes(0, 1) != plain)
    for of_shifted, of_plain in zip(shifted.swapaxes(0, 1), plain, strict=True):
        assert {*of_shifted[:, 0]} == {*of_plain[:, 0]}


@pytest.mark.parametrize("pieces", (2, 3, 8))
def test_every_piece_gets_its_share_of_rows_with_any_period(pieces):
    """One of each turn, and about as many of the rows at equal distances."""
    size = 1200 * pieces
    dealing = ShiftedDealing(size, pieces, granule=1)
    piece = np.empty(size, int)
    piece[dealt(dealing, np.arange(size))] = np.repeat(np.arange(pieces), 1200)
    turns = np.sort(piece.reshape(-1, pieces), axis=1)
    np.testing.assert_array_equal(turns, np.tile(np.arange(pieces), (1200, 1)))
    for period in range(1, 80):
        for first in range(min(period, 3)):
            counts = np.bincount(piece[first::period], minlength=pieces)
            expected = size / period / pieces
            assert np.all(abs(counts - expected) <= 1 + 4.5 * np.sqrt(expected))
