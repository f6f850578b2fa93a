"""The count sketch: linear, unbiased, with the noise of its law, and rows that collide apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiq_research.split_sketch.count_sketch import CountSketch, num_stretches
from tests.support.gradients import heavy_tailed, vnmse

SIZE, WIDTH, ROWS = 4096, 256, 3  # 16 coordinates share a cell
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def encoder(size: int, rows: int, width: int):
    """Return a function of (seed, values [size]) to cells [rows, width]."""
    return jax.jit(
        lambda seed, values: CountSketch.draw(jax.random.key(seed), size, rows, width).encode(
            values
        )
    )


@functools.cache
def decoder(size: int, rows: int, width: int):
    """Return a function of (seed, cells) to the estimates of all rows, [rows, size]."""

    def decode(seed, cells):
        sketch = CountSketch.draw(jax.random.key(seed), size, rows, width)
        each = [sketch.decode(cells, lambda found, row=row: found[row]) for row in range(rows)]
        return jnp.stack(each)

    return jax.jit(decode)


def estimates(seed: int, values: np.ndarray, rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    """Return the estimates of values from their own sketch, [rows, size]."""
    size = values.size
    cells = encoder(size, rows, width)(seed, values)
    return np.asarray(decoder(size, rows, width)(seed, cells))


def integers(seed: int, size: int = SIZE) -> np.ndarray:
    """Return integers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-1000, 1000, size).astype(np.float32)


@given(seed=seeds)
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(seed):
    one, other = integers(seed), integers(seed + 1)
    encode = functools.partial(encoder(SIZE, ROWS, WIDTH), seed)
    np.testing.assert_array_equal(encode(one) + encode(other), encode(one + other))
    np.testing.assert_array_equal(encode(-one), -encode(one))


@given(seed=seeds)
def test_cells_hold_every_coordinate_once_in_each_row(seed):
    """Signs aside: of powers of two, the parity of the sum of the cells is that of the values."""
    cells = np.asarray(encoder(SIZE, ROWS, WIDTH)(seed, integers(seed)), np.int64)
    np.testing.assert_array_equal(cells.sum(axis=1) % 2, integers(seed).astype(np.int64).sum() % 2)
    ones = np.ones(SIZE, np.float32)
    counted = np.asarray(encoder(SIZE, ROWS, WIDTH)(seed, ones))
    np.testing.assert_array_equal(np.abs(counted) % 2, SIZE // WIDTH % 2)


@pytest.mark.parametrize(("size", "width"), ((1, 1), (5, 1), (5, 7), (1000, 7), (257, 256)))
def test_one_coordinate_alone_comes_back(size, width):
    """At any place, also of a stretch that is padded, from each row."""
    for place in {0, size // 2, size - 1}:
        values = np.zeros(size, np.float32)
        values[place] = -3.5
        found = estimates(place, values, width=width)
        assert found.shape == (ROWS, size)
        np.testing.assert_array_equal(found[:, place], -3.5)
        # In each row, it is what the others of its cell are taken for.
        others = np.count_nonzero(found, axis=1)
        assert np.all(others <= num_stretches(size, width))
        assert set(np.abs(found[found != 0])) == {3.5}


def test_a_row_is_unbiased_and_has_the_noise_of_its_law():
    """The vNMSE of one row is the number of coordinates that share its cell, less one."""
    values, keys = heavy_tailed(0, (SIZE,)), 400
    found = np.stack([estimates(key, values, rows=1)[0] for key in range(keys)]).astype(np.float64)
    expected = SIZE // WIDTH - 1
    noise = np.array([vnmse(one, values) for one in found])
    assert noise.mean() == pytest.approx(expected, rel=0.03)
    mean = vnmse(found.mean(axis=0), values)
    assert mean == pytest.approx(expected / keys, rel=0.1)
    gain = found @ values.astype(np.float64) / np.sum(values.astype(np.float64) ** 2)
    assert abs(gain.mean() - 1) < 4 * gain.std() / np.sqrt(keys)


def test_rows_collide_independently():
    """Noise of two rows has no correlation, and squares of it have none. Two coordinates share a
    cell of one row with probability 1 / width, and of both with its square.
    """
    first, second = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    width, keys = 16, 300
    first[0], second[SIZE // 2 :] = 1, 1
    met = np.stack([estimates(key, first, 3, width)[:, SIZE // 2 :] for key in range(keys)])
    assert np.abs(met.mean(axis=(0, 2))).max() < 5 / np.sqrt(keys * SIZE / 2 / width)
    # Nor have those at the same place of two stretches, which meet if their shifts are equal.
    alike = met[:, :, ::width]
    assert np.abs(alike.mean(axis=(0, 2))).max() < 5 / np.sqrt(alike[:, 0].size * width)
    shared = met != 0
    np.testing.assert_allclose(shared.mean(axis=(0, 2)), 1 / width, rtol=0.05)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = np.mean(shared[:, one] & shared[:, other])
        assert both == pytest.approx(1 / width**2, rel=0.1)
        products = np.sum(met[:, one] * met[:, other])
        assert abs(products) < 5 * np.sqrt(keys * SIZE / 2 / width**2)


def test_coordinates_of_a_stretch_never_meet():
    values = np.zeros(SIZE, np.float32)
    values[:WIDTH] = integers(0)[:WIDTH]
    for key in range(5):
        np.testing.assert_array_equal(
            estimates(key, values)[:, :WIDTH], np.tile(values[:WIDTH], (ROWS, 1))
        )


def test_the_key_fixes_the_hashes():
    encode, values = encoder(SIZE, ROWS, WIDTH), integers(0)
    np.testing.assert_array_equal(encode(3, values), encode(3, values))
    cells = np.asarray(encode(3, values))
    others = np.concatenate([np.asarray(encode(4, values)), cells[1:], cells[:1]])
    for row in range(ROWS):  # neither of another key nor of another row
        assert np.mean(cells[row] == others[row]) < 0.1
        assert np.mean(cells[row] == others[ROWS + row]) < 0.1


def test_the_median_finds_what_stands_out():
    """Of 16,384 coordinates in 3 x 1024 cells: the largest, exactly where all others are zero."""
    size, width = 1 << 14, 1024
    values = np.zeros(size, np.float32)
    values[12_345] = 1000
    found = np.median(estimates(1, values, width=width), axis=0)
    assert np.flatnonzero(found).tolist() == [12_345] and found[12_345] == 1000
    noise = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    found = np.median(estimates(2, values + noise, width=width), axis=0)
    assert np.argmax(np.abs(found)) == 12_345
    # The median of three rows of noise, each of 16 coordinates.
    spread = np.std(np.delete(found - noise, 12_345))
    assert spread == pytest.approx(4 * 0.67, rel=0.1)
