"""Bytes that the operations of a backend move at least, beside the arrays that they have."""

import jax
import pytest

from dynamiq_jax._measurement import kernel_speed
from dynamiq_jax.methods import DynamiQ

SIZE = 2**14


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", kernel_speed.STEPS)
def test_least_bytes_are_those_of_the_arrays(operation, dtype):
    """Beside the widths and levels of a codec, which are small."""
    layout = DynamiQ(bits=5.0).layout(SIZE, num_chunks=1)
    arguments = kernel_speed._arguments(layout, dtype)[operation]
    program = kernel_speed.operation_of(operation, "xla", layout)
    arrays = jax.tree.leaves((arguments, jax.eval_shape(program, *arguments)))
    moved = sum(array.size * array.dtype.itemsize for array in arrays)
    least = kernel_speed.least_bytes(operation, layout, dtype) * SIZE
    assert 0.98 * moved < least <= moved
