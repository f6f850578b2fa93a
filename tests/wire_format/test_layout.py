"""Layouts: the sections of a message, and the levels of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynamiq_jax as dq
from tests.support import oracle
from tests.support.kernel_cases import small_layout

seeds = st.integers(0, 2**32 - 1)


@given(size=st.integers(1, 1 << 21), num_workers=st.integers(1, 9), bits=st.floats(2.375, 16))
def test_layouts_follow_the_page(size, num_workers, bits):
    layout = dq.DynamiQ(bits=bits).layout(size, num_workers)
    rows = oracle.rows_per_chunk(size, num_workers)
    assert layout.rows_per_chunk == rows
    assert layout.num_rows == num_workers * rows >= -(-size // 256)
    assert layout.units == int((bits - 0.375) * rows + 1e-6)
    assert layout.payload_bytes == oracle.payload_bytes(rows, layout.units, 32)
    # Everything fits, and nobody pays for more than `bits`.
    assert 2 * rows <= layout.units <= 16 * rows
    used = 32 * layout.units + (256 // 32 + 2) * rows
    assert used <= layout.payload_bytes < used + 16
    assert 8 * used <= (bits - 16 / 256) * 256 * rows + 1e-6
    assert layout.payload_bytes % 16 == 0


def test_whole_units_are_not_lost_to_rounding():
    """4.9 - 0.375 times 40 rows is 180.99999... in float64."""
    assert dq.DynamiQ(bits=4.9).layout(40 * 256, 1).units == 181


@pytest.mark.parametrize("group_size", (8, 16, 32))
@settings(max_examples=3)
@given(seed=seeds)
def test_sections_are_those_of_the_oracle(group_size, seed):
    layout, rng = small_layout(35, (2, 4, 8), group_size=group_size), np.random.default_rng(seed)
    rows, units = layout.rows_per_chunk, layout.units
    widths = np.sort(rng.choice((2, 4), rows))[::-1]

    def random_scales():
        group_bytes = rng.integers(0, 256, (rows, 256 // group_size), np.uint8)
        return group_bytes, rng.integers(0, 2**16, rows, np.uint16)

    codes = rng.integers(0, 2**16, (rows, 256), np.uint16) & (2 ** widths[:, None] - 1)
    of_rows, others = random_scales(), random_scales()
    first, second = (
        oracle.pack_message(codes.astype(np.uint16), *scales, widths, units)
        for scales in (of_rows, others)
    )

    @jax.jit
    def run(first, second, of_rows, others):
        two, planes = jnp.stack([first, second]), layout.planes(first)
        swapped = [jnp.stack([b, a]) for a, b in zip(of_rows, others, strict=True)]
        # The scales of another message, in bytes or words.
        replaced = [
            layout.with_scales_of(*(m.view(dtype) for m in two)).view(jnp.uint8)
            for dtype in (jnp.uint8, jnp.uint32)
        ]
        joined = layout.message(planes, *of_rows)
        return planes, joined, layout.scales(two), layout.with_scales(two, *swapped), replaced

    planes, joined, scales, swapped, replaced = run(first, second, of_rows, others)
    assert planes.shape == (units, 32)
    np.testing.assert_array_equal(joined, first)
    assert layout.padding_start < layout.payload_bytes
    for part, found in enumerate(scales):
        np.testing.assert_array_equal(found, np.stack([of_rows[part], others[part]]))
    # Replaced scales leave the codes and the padding alone.
    np.testing.assert_array_equal(swapped, [second, first])
    np.testing.assert_array_equal(replaced, [second, second])
