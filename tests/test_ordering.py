"""Rows to width classes: a permutation, the same for all chunks, that favours large norms."""

import jax
import numpy as np
import pytest
from dynamiq_jax.codec import layout, ordering
from hypothesis import given
from hypothesis import strategies as st

from tests.support import oracle

order_rows = jax.jit(ordering.order_rows, static_argnums=1)
restore_rows = jax.jit(ordering.restore_rows)
seeds = st.integers(0, 2**32 - 1)
layouts = pytest.mark.parametrize(
    ("num_workers", "rows", "fractions"),
    (
        (1, 10, ((8, 1.0),)),
        (2, 33, ((8, 0.3), (4, 0.7))),
        (4, 50, ((16, 0.1), (6, 0.4), (4, 0.2), (0, 0.3))),
        (8, 64, ((8, 0.25), (4, 0.5), (2, 0.25))),
        (5, 7, ((12, 0.5), (2, 0.5))),
    ),
)


def layout_of(num_workers, rows, fractions) -> layout.Layout:
    """Of a bucket that fills its chunks of `rows` rows."""
    return layout.make_layout(
        256 * num_workers * rows,
        num_workers,
        fractions=fractions,
        group_size=32,
        spacing="quadratic",
        gap_ratio=2.7,
        rounding="correlated",
    )


def random_norms(seed: int, count: int) -> np.ndarray:
    """bfloat16 bits with ties, zeros and a NaN."""
    rng = np.random.default_rng(seed)
    bits = oracle.bf16_nearest(np.exp2(rng.integers(-40, 40, count) / 4))
    bits[rng.random(count) < 0.1] = 0
    bits[rng.integers(count)] = oracle.BF16_NAN
    return bits


def width_of_row(order: np.ndarray, shape: layout.Layout) -> np.ndarray:
    widths = np.zeros(shape.num_rows, int)
    for c in shape.classes:
        widths[order[:, c.first_row : c.first_row + c.rows]] = c.width
    return widths


@layouts
@given(seed=seeds)
def test_the_order_is_that_of_the_oracle(num_workers, rows, fractions, seed):
    shape = layout_of(num_workers, rows, fractions)
    bits = random_norms(seed, shape.num_rows)
    class_rows = [(c.width, c.rows) for c in shape.classes]
    order = order_rows(bits, shape)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, oracle.row_table(bits, class_rows, num_workers))


@layouts
@given(seed=seeds)
def test_restoring_inverts_the_order(num_workers, rows, fractions, seed):
    shape = layout_of(num_workers, rows, fractions)
    order = np.asarray(order_rows(random_norms(seed, shape.num_rows), shape))
    np.testing.assert_array_equal(np.sort(order.reshape(-1)), np.arange(shape.num_rows))
    values = np.random.default_rng(seed).standard_normal((shape.num_rows, 256)).astype(np.float32)
    np.testing.assert_array_equal(restore_rows(values[order.reshape(-1)], order), values)
    # Also the other way, so that neither is the identity by accident.
    np.testing.assert_array_equal(
        np.asarray(restore_rows(values, order))[order.reshape(-1)], values
    )


@layouts
@given(seed=seeds)
def test_no_row_is_wider_than_one_of_larger_norm(num_workers, rows, fractions, seed):
    shape = layout_of(num_workers, rows, fractions)
    bits = random_norms(seed, shape.num_rows)
    widths = width_of_row(np.asarray(order_rows(bits, shape)), shape)
    by_norm = np.argsort(-bits.astype(int), kind="stable")
    assert np.all(np.diff(widths[by_norm]) <= 0)
    counts = {c.width: num_workers * c.rows for c in shape.classes}
    assert {width: int(np.sum(widths == width)) for width in counts} == counts


@layouts
@given(seed=seeds)
def test_every_chunk_gets_its_share_of_every_class(num_workers, rows, fractions, seed):
    """Inside a class, ranks are dealt like cards: no chunk is ahead by more than one row."""
    shape = layout_of(num_workers, rows, fractions)
    bits = random_norms(seed, shape.num_rows)
    order = np.asarray(order_rows(bits, shape))
    rank = np.empty(shape.num_rows, int)
    rank[np.argsort(-bits.astype(int), kind="stable")] = np.arange(shape.num_rows)
    for c in shape.classes:
        dealt = rank[order[:, c.first_row : c.first_row + c.rows]]
        assert np.all(np.diff(dealt, axis=1) == num_workers)
        assert np.all(np.diff(dealt, axis=0) == 1)


@pytest.mark.parametrize("rows", (2**17, 2**17 + 1), ids=("one_word", "argsort"))
def test_rows_are_ranked_either_side_of_what_one_word_holds(rows):
    """2^17 rows are the most whose norm and index share 32 bits."""
    bits = random_norms(0, rows)
    order = jax.jit(ordering.rank)(bits)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, np.argsort(-bits.astype(int), kind="stable"))


def test_ties_keep_their_order():
    shape = layout_of(2, 33, ((8, 0.3), (4, 0.7)))
    order = np.asarray(order_rows(np.full(66, 0x3F80, np.uint16), shape))
    np.testing.assert_array_equal(order.T.reshape(-1), np.arange(66))
