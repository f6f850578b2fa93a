"""Rows of vectors that are dealt to pieces: stripes, and shards of pipelined steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq_jax._buckets.dealing import Dealing


@settings(max_examples=12)  # each compiles
@given(
    columns=st.lists(
        st.integers(1, 3000) | st.integers(1, 12).map(lambda n: 256 * n), min_size=1, max_size=4
    ),
    batch=st.integers(1, 3),
    pieces=st.integers(1, 5),
)
def test_every_coordinate_is_in_one_piece(columns, batch, pieces):
    """Pieces are alike, have one row of each turn of a vector, and are joined to it again."""
    dealing = Dealing(tuple(columns), pieces)
    ends = np.cumsum([0, *columns])
    vectors = [
        1 + jnp.arange(batch * n, dtype=jnp.float32).reshape(batch, n) + 10_000 * k
        for k, n in enumerate(columns)
    ]

    @jax.jit
    def deal(vectors):
        dealt = dealing.deal(vectors)
        return dealt, [dealing.take(dealt, np.int32(number)) for number in range(pieces)]

    @jax.jit
    def put_and_undeal(dealt, taken):
        for number, piece in enumerate(taken):
            dealt = dealing.put(dealt, np.int32(number), piece)
        return dealing.undeal(dealt)

    dealt, taken = jax.tree.map(np.asarray, deal(vectors))
    assert {piece.shape for piece in taken} == {(batch, dealing.size)}
    assert 0 <= pieces * dealing.size - ends[-1] < 256 * pieces
    found = np.sort(np.concatenate(taken, axis=1), axis=1)
    wanted = np.sort(np.concatenate(vectors, axis=1), axis=1)
    assert not found[:, : found.shape[1] - ends[-1]].any()
    np.testing.assert_array_equal(found[:, found.shape[1] - ends[-1] :], wanted)
    for vector in vectors:
        turns = vector.shape[1] // (256 * pieces)
        whole = np.asarray(vector[:, : turns * 256 * pieces]).reshape(batch, turns, pieces, 256)
        for number, piece in enumerate(taken):
            of_vector = np.isin(piece, whole)
            np.testing.assert_array_equal(piece[of_vector], whole[:, :, number].reshape(-1))
    changed = put_and_undeal(dealt, [-piece for piece in taken])
    for vector, back in zip(vectors, changed, strict=True):
        np.testing.assert_array_equal(back, -vector)


@given(
    columns=st.lists(st.integers(1, 3 * 2**17), min_size=2, max_size=60),
    pieces=st.integers(1, 40),
)
def test_small_neighbors_are_dealt_as_one(columns, pieces):
    """Groups keep the order of vectors, and join small ones, and at most 3/4 of all coordinates."""
    turn = 256 * pieces
    whole = [n // turn * turn for n in columns]
    numbers = Dealing(tuple(columns), pieces)._groups
    assert [each for group in numbers for each in group] == [i for i, n in enumerate(whole) if n]
    groups = [[whole[each] for each in group] for group in numbers]
    joined = [group for group in groups if len(group) > 1]
    assert sum(map(sum, joined)) <= 0.75 * sum(columns)
    assert all(max(group) <= 2**17 and sum(group) <= 2**20 for group in joined)


@pytest.mark.parametrize("size", (2**12, 2**14, 2**17))
def test_many_small_vectors_are_few_arrays(size):
    """All vectors of a size are joined until 3/4 of their coordinates are."""
    groups = Dealing((size,) * 1000, 4)._groups
    assert len(groups) <= 250 + 2**20 // size + 1000 * size // 2**20
    assert sum(len(group) for group in groups if len(group) > 1) >= 749


def take_all(dealing, vector):
    return np.asarray(dealing.take_all(dealing.deal([jnp.asarray(vector)[None]])))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shifted", (True, False))
@pytest.mark.parametrize("pieces, rows", ((1, 3), (2, 5), (3, 4), (8, 7)))
def test_all_pieces_of_a_vector_and_back(pieces, rows, shifted):
    """`places` has the coordinates of the pieces, and zeros are where there are none."""
    size = 4 * pieces * rows - 3
    dealing = Dealing((size,), pieces, granule=4, shifted=shifted)
    assert dealing.size == 4 * rows
    vector = np.arange(1, size + 1, dtype=np.int32)
    taken = take_all(dealing, vector)
    places = np.asarray(dealing.places(jnp.arange(pieces, dtype=jnp.int32)))
    np.testing.assert_array_equal(np.where(places < size, places + 1, 0), taken)
    (back,) = dealing.undeal(dealing.put_all(jnp.asarray(taken)))
    np.testing.assert_array_equal(back, vector[None])


def test_a_piece_that_a_loop_takes_is_that_of_all_pieces():
    """Stripes and shards are dealt by one rule. Shifts alone set them apart."""
    vector = np.arange(1, 256 * 13, dtype=np.float32)
    dealing = Dealing(vector.shape, 3)
    dealt = dealing.deal([jnp.asarray(vector)[None]])
    one_by_one = [dealing.take(dealt, np.int32(number))[0] for number in range(3)]
    np.testing.assert_array_equal(np.concatenate(one_by_one), take_all(dealing, vector))
    shifted = take_all(Dealing(vector.shape, 3, shifted=True), vector)
    assert np.any(shifted != np.concatenate(one_by_one))
    turns = (one.reshape(3, -1, 256).swapaxes(0, 1) for one in (shifted, np.stack(one_by_one)))
    for of_shifted, of_plain in zip(*turns, strict=True):
        assert {*of_shifted[:, 0]} == {*of_plain[:, 0]}, "a turn has the same rows"


@pytest.mark.parametrize("pieces", (2, 3, 8))
def test_every_piece_gets_its_share_of_rows_with_any_period(pieces):
    """One of each turn, and about as many of the rows at equal distances."""
    size = 1200 * pieces
    dealing = Dealing((size,), pieces, granule=1, shifted=True)
    piece = np.empty(size, int)
    piece[take_all(dealing, np.arange(size))] = np.repeat(np.arange(pieces), 1200)
    turns = np.sort(piece.reshape(-1, pieces), axis=1)
    np.testing.assert_array_equal(turns, np.tile(np.arange(pieces), (1200, 1)))
    for period in range(1, 80):
        for first in range(min(period, 3)):
            counts = np.bincount(piece[first::period], minlength=pieces)
            expected = size / period / pieces
            assert np.all(abs(counts - expected) <= 1 + 4.5 * np.sqrt(expected))
