"""Rows of vectors that are dealt to stripes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq_jax._buckets.dealing import Dealing


@settings(max_examples=6)  # each compiles
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
    columns=st.lists(st.integers(1, 3 * 2**17), min_size=2, max_size=60), pieces=st.integers(1, 40)
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
