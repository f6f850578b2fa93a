"""Rows to places: a permutation that deals the rows to the chunks, and favors large norms."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.codec import ordering
from tests.support import oracle
from tests.support.kernel_cases import small_layout

place_rows = jax.jit(ordering.place_rows, static_argnums=1, static_argnames="consecutive")
seeds = st.integers(0, 2**32 - 1)
ALL = tuple(range(2, 17))
layouts = pytest.mark.parametrize(
    ("rows", "widths", "bits", "num_chunks"),
    (
        (10, (8,), 8.0, 1),
        (33, ALL, 4.7, 2),
        (50, (0, 4, 6, 16), 3.1, 4),
        (64, (2, 4, 8), 4.6, 8),
        (7, ALL, 2.5, 5),
        (1, ALL, 4.6, 6),
    ),
)


def random_norms(seed: int, count: int) -> np.ndarray:
    """bfloat16 bits with ties, zeros and a NaN."""
    rng = np.random.default_rng(seed)
    bits = oracle.bf16_nearest(np.exp2(rng.integers(-40, 40, count) / 4))
    bits[rng.random(count) < 0.1] = 0
    bits[rng.integers(count)] = oracle.BF16_NAN
    return bits


@pytest.mark.sampled(2)
@layouts
@given(seed=seeds)
def test_places_are_those_of_the_oracle(rows, widths, bits, num_chunks, seed):
    layout = small_layout(rows, widths, bits, num_chunks)
    norms = random_norms(seed, layout.num_rows)
    for consecutive in (False, True):
        places = place_rows(norms, layout, consecutive=consecutive)
        table = oracle.consecutive_table if consecutive else oracle.row_table
        expected = table(norms, num_chunks)
        np.testing.assert_array_equal(places.order, expected)
        for of_chunk, found, starts in zip(expected, places.widths, places.starts, strict=True):
            energies = oracle.energies_of_norms(norms[of_chunk])
            solved = oracle.solve_widths(energies, layout.units, widths, 1.0)
            np.testing.assert_array_equal(found, solved)
            # Planes start where those before end.
            in_plane = solved[:, None] > np.arange(16)
            np.testing.assert_array_equal(starts, [0, *np.cumsum(in_plane.sum(axis=0))])
        assert {leaf.dtype for leaf in places} == {np.dtype(np.int32)}


def test_the_places_of_a_chunk_are_its_part():
    layout = small_layout(10, ALL, 4.6, 3)
    places = place_rows(random_norms(0, layout.num_rows), layout)
    for part, whole in zip(places.at(1), places, strict=True):
        np.testing.assert_array_equal(part, whole[1])


def test_a_row_without_a_usual_norm_is_the_last_that_is_not_zero():
    layout = small_layout(7, ALL, 4.7, 1)
    nan, zero, subnormal, largest = oracle.BF16_NAN, 0, 1, 0x7E80  # 2^126
    bits = np.array([nan, 0x0080, zero, largest + 1, subnormal, 0x3F80, largest], np.uint16)
    places = place_rows(bits, layout)
    np.testing.assert_array_equal(places.order, [[6, 5, 1, 0, 3, 4, 2]])
    assert np.asarray(places.widths)[0, 3:5].tolist() == [2, 2]


@pytest.mark.parametrize("rows", (1, 2, 2**17, 2**17 + 1))
def test_rows_are_ranked_on_either_side_of_what_one_word_holds(rows):
    """2^17 rows are the most whose norm and index share 32 bits."""
    bits = random_norms(0, rows)
    order, ranked = jax.jit(ordering.rank)(bits)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, np.argsort(-bits.astype(int), kind="stable"))
    np.testing.assert_array_equal(ranked, bits[order])
    assert ranked.dtype == np.uint16
