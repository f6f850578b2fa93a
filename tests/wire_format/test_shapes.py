"""Shapes and dtypes in the annotations of the codec, which are checked in each test."""

import jax.numpy as jnp
import pytest

from pallas_kernels.codec import packing, rows
from pallas_kernels.codec.levels import make_levels


@pytest.mark.parametrize("codes", [jnp.zeros((4, 128), jnp.uint16), jnp.zeros((4, 256), jnp.int32)])
def test_another_shape_or_dtype_is_an_error(codes):
    with pytest.raises(TypeError, match="typechecking parameter 'codes'"):
        packing.pack(codes, 4)


def test_dimensions_of_one_name_are_equal():
    levels = make_levels(4, "quadratic", 4.0)
    scales = jnp.zeros((4, 16), jnp.uint8), jnp.zeros(5, jnp.uint16)
    with pytest.raises(TypeError, match="typechecking parameter 'super_bits'"):
        rows.decode_rows(jnp.zeros((4, 256), jnp.uint16), *scales, levels, group_size=16)
