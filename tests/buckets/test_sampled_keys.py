"""Keys from a sample of arrays: the changes that a sample shows, and its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq_jax._run import sample
from dynamiq_jax._run.sample import fold_in_sample
from tests.support.workers import mapped

KEY = jax.random.key(0)


def key_of_leaves(*leaves):
    return tuple(np.asarray(jax.random.key_data(fold_in_sample(KEY, leaves, (), None))).tolist())


@settings(max_examples=10)
@given(rows=st.integers(1, 600), columns=st.integers(251, 600))
def test_a_sample_of_a_matrix_has_each_row_and_each_column(rows, columns):
    """One row, and zeros elsewhere, as in a gradient of an embedding, is in the sample."""
    places = np.asarray(sample._sample(jnp.arange(rows * columns).reshape(rows, columns)))
    assert {*(places // columns)} == {*range(rows)}
    if rows >= 251 and columns % 251:
        assert {*(places % columns)} == {*range(columns)}


@pytest.mark.parametrize("size", (1, 255, 511))
def test_a_sample_of_a_small_array_is_all_of_it(size):
    np.testing.assert_array_equal(sample._sample(jnp.arange(size)), np.arange(size))


@pytest.mark.parametrize("dtype", ("complex64", "int64", "float64", "uint8", "bfloat16"))
def test_a_sample_has_all_bits_and_places(dtype):
    with jax.enable_x64(True):
        plain = jnp.asarray([0, 1, 1, 0], dtype)
        others = [jnp.asarray(other, dtype) for other in ([1, 0, 1, 0], [0, 1, 1, 1])]
        last = {"complex64": 1j, "int64": 2**40, "float64": 1 + 2.0**-50}.get(dtype, 7)
        others.append(plain.at[1].set(last))
        keys = [key_of_leaves(array) for array in (plain, *others)]
    assert len({*keys}) == len(keys)


@given(size=st.integers(1, 10**6))
def test_a_sample_is_small_and_not_too_small(size):
    [found] = jax.eval_shape(sample._sample, jax.ShapeDtypeStruct((size,), jnp.float32)).shape
    assert min(size, 171) <= found <= max(size / 251 + 1, 511)


@pytest.mark.parametrize("change", ((0, 0), (1, 7), (3, 63)))
def test_all_workers_get_one_key_and_it_depends_on_each_of_them(data_mesh, change):
    """Also on the order of the workers."""
    rows = jax.random.normal(jax.random.key(1), (4, 64))

    def local(rows):
        return jax.random.key_data(fold_in_sample(KEY, [rows], ("data",), None))

    run = jax.jit(mapped(local, data_mesh(4)))
    keys = [np.asarray(run(each)) for each in (rows, rows.at[change].add(1), rows[::-1])]
    for each in keys:
        np.testing.assert_array_equal(each, np.tile(each[:1], (4, 1)))
    assert len({each[0].tobytes() for each in keys}) == len(keys)
