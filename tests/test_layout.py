"""Layouts: which rows of a chunk get which width, and where everything lies in a message."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynamiq_jax as dq
from pallas_kernels.codec import WIDTHS, Layout, Quantizer, levels, make_layout
from tests.support import oracle

QUANTIZER = Quantizer(group_size=32, spacing="quadratic", gap_ratio=2.7, rounding="correlated")
seeds = st.integers(0, 2**32 - 1)


@st.composite
def fractions_of_widths(draw) -> tuple[tuple[int, float], ...]:
    """Shares of some widths, widest first, among them shares that no row takes."""
    widths = sorted(draw(st.sets(st.sampled_from(WIDTHS), min_size=1, max_size=6)), reverse=True)
    weights = [draw(st.sampled_from((0.001, 1.0, 1.0, 2.5))) for _ in widths]
    return tuple((w, weight / sum(weights)) for w, weight in zip(widths, weights, strict=True))


def class_rows(layout: Layout) -> list[tuple[int, int]]:
    return [(c.width, c.rows) for c in layout.classes]


@pytest.mark.parametrize(
    ("shares", "rows", "expected"),
    (
        ((0.5, 0.5), 5, [2, 3]),  # 2.5 to the even number below ...
        ((0.5, 0.5), 7, [4, 3]),  # ... and 3.5 to the one above
        ((0.3, 0.7), 33, [10, 23]),  # 9.9 is rounded, not cut off
        ((0.25, 0.25, 0.5), 10, [2, 3, 5]),  # sums are rounded: 2.5 and 5
        ((0.26, 0.26, 0.48), 5, [1, 2, 2]),  # 1.3 and 2.6
        ((0.9, 0.1), 3, [3]),  # a class without rows is left out
    ),
)
def test_the_rows_of_each_class_are_those_of_the_page(shares, rows, expected):
    fractions = tuple(zip((8, 6, 4), shares, strict=False))
    layout = make_layout(256 * 2 * rows, 2, fractions, QUANTIZER)
    assert [c.rows for c in layout.classes] == expected
    assert class_rows(layout) == oracle.class_rows_of(fractions, rows)


@given(fractions=fractions_of_widths(), size=st.integers(1, 1 << 21), num_chunks=st.integers(1, 9))
def test_layouts_follow_the_page(fractions, size, num_chunks):
    layout = make_layout(size, num_chunks, fractions, QUANTIZER)
    rows = oracle.rows_per_chunk(size, num_chunks)
    expected = oracle.class_rows_of(fractions, rows)
    assert class_rows(layout) == expected
    assert layout.rows_per_chunk == rows
    assert layout.payload_bytes == oracle.payload_bytes(expected, 32)


@given(size=st.integers(1, 1 << 21), num_workers=st.integers(1, 9), bits=st.floats(2.5, 16))
def test_layouts_have_room_for_every_row(size, num_workers, bits):
    layout = dq.DynamiQ(bits=bits).layout(size, num_workers)
    rows = -(-size // 256)
    assert layout.rows_per_chunk == -(-rows // num_workers)
    assert layout.num_rows == num_workers * layout.rows_per_chunk >= rows
    first_row, codes_start = 0, 0
    for c in layout.classes:
        assert (c.first_row, c.codes_start) == (first_row, codes_start)
        assert c.rows > 0
        first_row += c.rows
        codes_start += 32 * c.width * c.rows
    assert first_row == layout.rows_per_chunk
    widths = [c.width for c in layout.classes]
    assert widths == sorted(set(widths), reverse=True)
    used = codes_start + (256 // layout.group_size + 2) * layout.rows_per_chunk
    assert used <= layout.payload_bytes < used + 16
    assert layout.payload_bytes % 16 == 0


def test_shares_that_add_up_to_almost_one_still_cover_every_row():
    """A million rows a chunk, and shares as far from 1 as a method accepts."""
    shares = ((8, 0.25), (6, 0.25), (4, 0.25), (2, 0.25 - 9e-7))
    rows = 1 << 20
    layout = dq.DynamiQ(bits=5.375, fractions=shares).layout(256 * rows, 1)
    assert layout.rows_per_chunk == rows
    assert class_rows(layout) == [(width, rows // 4) for width, _ in shares]


@given(size=st.integers(1, 5000), num_chunks=st.integers(1, 4))
@settings(max_examples=10)
def test_rows_are_the_coordinates_in_their_order_then_zeros(size, num_chunks):
    layout = make_layout(size, num_chunks, ((4, 1.0),), QUANTIZER)
    flat = np.arange(1, size + 1, dtype=np.float32)
    rows = np.asarray(layout.as_rows(flat))
    np.testing.assert_array_equal(rows, oracle.to_rows(flat, num_chunks))
    np.testing.assert_array_equal(layout.as_flat(rows), flat)


@functools.cache
def mixed(group_size: int, widths: tuple[int, ...]) -> tuple:
    """A layout with 35 rows a chunk and a class of each width, and its functions."""
    quantizer = Quantizer(
        group_size=group_size, spacing="geometric", gap_ratio=2.0, rounding="nearest"
    )
    shares = tuple((width, 1 / len(widths)) for width in widths)
    layout = make_layout(256 * 2 * 35, 2, shares, quantizer)
    return layout, *map(jax.jit, (layout.pack, layout.unpack, layout.scales, layout.with_scales))


@pytest.mark.parametrize(
    ("group_size", "widths"),
    ((16, WIDTHS[::-1]), (8, (9, 3)), (32, (7,))),
    ids=("all_widths", "two_widths", "one_width"),
)
@settings(max_examples=3)
@given(seed=seeds)
def test_messages_are_those_of_the_oracle(group_size, widths, seed):
    layout, pack, unpack, scales, with_scales = mixed(group_size, widths)
    rng, rows, mix = np.random.default_rng(seed), layout.rows_per_chunk, class_rows(layout)

    def random_scales():
        group_bytes = rng.integers(0, 256, (rows, 256 // group_size), np.uint8)
        return group_bytes, rng.integers(0, 2**16, rows, np.uint16)

    codes = rng.integers(0, 2**16, (rows, 256), np.uint16)
    for width, places in oracle.class_slices(mix):
        codes[places] &= np.uint16(2**width - 1)
    of_rows, others = random_scales(), random_scales()
    message = np.asarray(pack(codes, *of_rows))
    np.testing.assert_array_equal(message, oracle.pack_message(codes, *of_rows, mix))
    assert layout.padding_start < layout.payload_bytes
    for found, expected in zip(unpack(message), (codes, *of_rows), strict=True):
        np.testing.assert_array_equal(found, expected)

    # Of several messages at once; replaced scales leave the codes and the padding alone.
    two = np.stack([message, oracle.pack_message(codes, *others, mix)])
    for part, found in enumerate(scales(two)):
        np.testing.assert_array_equal(found, np.stack([of_rows[part], others[part]]))
    swapped = [np.stack([b, a]) for a, b in zip(of_rows, others, strict=True)]
    np.testing.assert_array_equal(with_scales(two, *swapped), two[::-1])


@pytest.mark.parametrize(("first", "count"), ((0, 35), (7, 20)))
def test_every_row_has_the_levels_of_its_width(first, count):
    layout = mixed(16, WIDTHS[::-1])[0]
    widths = np.repeat(*zip(*class_rows(layout), strict=True))[first : first + count]
    found = layout.levels(first, count)
    expected = [levels.make_levels(int(width), "geometric", 2.0) for width in widths]
    for column, *numbers in zip(*map(jax.tree.leaves, (found, *expected)), strict=True):
        np.testing.assert_array_equal(column, np.reshape(np.array(numbers, np.float32), (-1, 1)))
