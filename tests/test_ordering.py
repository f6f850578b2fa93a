"""Rows to width classes: a permutation, the same for all chunks, that favors large norms."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.codec import Layout, Quantizer, make_layout, ordering
from tests.support import oracle

order_rows = jax.jit(ordering.order_rows, static_argnums=1, static_argnames="consecutive")
restore_rows = jax.jit(ordering.restore_rows)
seeds = st.integers(0, 2**32 - 1)
QUANTIZER = Quantizer(group_size=32, spacing="quadratic", gap_ratio=2.7, rounding="correlated")
layouts = pytest.mark.parametrize(
    ("num_chunks", "rows", "fractions"),
    (
        (1, 10, ((8, 1.0),)),
        (2, 33, ((8, 0.3), (4, 0.7))),
        (4, 50, ((16, 0.1), (6, 0.4), (4, 0.2), (0, 0.3))),
        (8, 64, ((8, 0.25), (4, 0.5), (2, 0.25))),
        (5, 7, ((12, 0.5), (2, 0.5))),
    ),
)


def layout_of(num_chunks, rows, fractions) -> Layout:
    """Layout of a bucket that fills its chunks of `rows` rows."""
    return make_layout(256 * num_chunks * rows, num_chunks, fractions, QUANTIZER)


def random_norms(seed: int, count: int) -> np.ndarray:
    """bfloat16 bits with ties, zeros and a NaN."""
    rng = np.random.default_rng(seed)
    bits = oracle.bf16_nearest(np.exp2(rng.integers(-40, 40, count) / 4))
    bits[rng.random(count) < 0.1] = 0
    bits[rng.integers(count)] = oracle.BF16_NAN
    return bits


def width_of_row(order: np.ndarray, layout: Layout) -> np.ndarray:
    widths = np.zeros(layout.num_rows, int)
    for c in layout.classes:
        widths[order[:, c.first_row : c.first_row + c.rows]] = c.width
    return widths


@layouts
@given(seed=seeds)
def test_the_order_is_that_of_the_oracle(num_chunks, rows, fractions, seed):
    layout = layout_of(num_chunks, rows, fractions)
    bits = random_norms(seed, layout.num_rows)
    class_rows = oracle.class_rows_of(fractions, rows)
    order = order_rows(bits, layout)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, oracle.row_table(bits, class_rows, num_chunks))
    consecutive = order_rows(bits, layout, consecutive=True)
    assert consecutive.dtype == np.int32
    np.testing.assert_array_equal(consecutive, oracle.consecutive_table(bits, num_chunks))


@layouts
@settings(max_examples=5)
@given(seed=seeds)
def test_restoring_inverts_the_order(num_chunks, rows, fractions, seed):
    layout = layout_of(num_chunks, rows, fractions)
    order = np.asarray(order_rows(random_norms(seed, layout.num_rows), layout))
    np.testing.assert_array_equal(np.sort(order.reshape(-1)), np.arange(layout.num_rows))
    values = np.random.default_rng(seed).standard_normal((layout.num_rows, 256)).astype(np.float32)
    np.testing.assert_array_equal(restore_rows(values[order.reshape(-1)], order), values)
    # Also the other way, so that neither is the identity by accident.
    np.testing.assert_array_equal(
        np.asarray(restore_rows(values, order))[order.reshape(-1)], values
    )


@layouts
@given(seed=seeds)
def test_no_row_is_wider_than_one_of_larger_norm(num_chunks, rows, fractions, seed):
    layout = layout_of(num_chunks, rows, fractions)
    bits = random_norms(seed, layout.num_rows)
    widths = width_of_row(np.asarray(order_rows(bits, layout)), layout)
    by_norm = np.argsort(-bits.astype(int), kind="stable")
    assert np.all(np.diff(widths[by_norm]) <= 0)
    counts = {c.width: num_chunks * c.rows for c in layout.classes}
    assert {width: int(np.sum(widths == width)) for width in counts} == counts


@layouts
@given(seed=seeds)
def test_every_chunk_gets_its_share_of_every_class(num_chunks, rows, fractions, seed):
    """Inside a class, ranks are dealt like cards: no chunk is ahead by more than one row."""
    layout = layout_of(num_chunks, rows, fractions)
    bits = random_norms(seed, layout.num_rows)
    order = np.asarray(order_rows(bits, layout))
    rank = np.empty(layout.num_rows, int)
    rank[np.argsort(-bits.astype(int), kind="stable")] = np.arange(layout.num_rows)
    for c in layout.classes:
        dealt = rank[order[:, c.first_row : c.first_row + c.rows]]
        assert np.all(np.diff(dealt, axis=1) == num_chunks)
        assert np.all(np.diff(dealt, axis=0) == 1)


@pytest.mark.parametrize("rows", (1, 2, 2**17, 2**17 + 1))
def test_rows_are_ranked_on_either_side_of_what_one_word_holds(rows):
    """2^17 rows are the most whose norm and index share 32 bits."""
    bits = random_norms(0, rows)
    order = jax.jit(ordering.rank)(bits)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, np.argsort(-bits.astype(int), kind="stable"))


def test_ties_keep_their_order():
    layout = layout_of(2, 33, ((8, 0.3), (4, 0.7)))
    order = np.asarray(order_rows(np.full(66, 0x3F80, np.uint16), layout))
    np.testing.assert_array_equal(order.T.reshape(-1), np.arange(66))
