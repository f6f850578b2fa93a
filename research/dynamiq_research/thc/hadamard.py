"""Randomized Hadamard rotation: random signs, then the Walsh-Hadamard transform of every block.

The rotation is orthonormal, so it keeps norms and inner products. Afterwards the coordinates of any
block are nearly normal and of one size (Ailon and Chazelle, "The fast Johnson-Lindenstrauss
transform", 2009). The transform is its own inverse.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_FACTOR_BITS = 7  # 128 x 128 is the largest matrix: what a matrix unit takes in one piece


def random_signs(key: Array, block: int) -> Array:
    """Draw +1 or -1 for each coordinate of a block, float32 [block], which all blocks share."""
    # `rademacher` draws other signs where numbers have 64 bits.
    is_positive = jax.random.bernoulli(key, np.float32(0.5), (block,))
    return np.float32(2) * is_positive.astype(jnp.float32) - np.float32(1)


def rotate(blocks: Array, signs: Array) -> Array:
    """Rotate float32 [blocks, block], whose norms are below 2^127, by `random_signs`.

    A block is a power of two of coordinates.
    """
    return _transform(blocks * (signs * _scale(signs.size))[None, :])


def unrotate(blocks: Array, signs: Array) -> Array:
    """Invert `rotate`."""
    return _transform(blocks * _scale(signs.size)) * signs[None, :]


def _scale(block: int) -> np.float32:
    """Return the factor that makes the transform orthonormal.

    It is applied first: sums of a block's coordinates would leave the range of float32 before its
    norm does.
    """
    return np.float32(1 / math.sqrt(block))


def _transform(blocks: Array) -> Array:
    """Compute the Walsh-Hadamard transform of rows.

    There is a matrix product for each factor of their length. Two products with 128 x 128 matrices
    take 18 times the additions of the fast transform's 14 steps. But they read and write memory 7
    times less often, and matrix units make them cheap.
    """
    factors = _factors(blocks.shape[-1])
    values = blocks.reshape(-1, *factors)
    for factor in reversed(factors):
        # The axis that was summed goes to the front, so that each axis is last once.
        values = jnp.tensordot(values, _hadamard(factor), axes=1, precision=lax.Precision.HIGHEST)
        values = jnp.moveaxis(values, -1, 1)
    return values.reshape(blocks.shape)


def _factors(block: int) -> tuple[int, ...]:
    """Split a block into powers of two up to 128, as equal as possible: 2^9 -> (32, 16)."""
    bits = block.bit_length() - 1
    count = -(-bits // _FACTOR_BITS)
    return tuple(2 ** ((bits + place) // count) for place in reversed(range(count)))


@functools.cache
def _hadamard(size: int) -> np.ndarray:
    """Return the Hadamard matrix of +1 and -1 in natural order, float32 [size, size]."""
    index = np.arange(size, dtype=np.uint32)
    parity = np.bitwise_count(index[:, None] & index[None, :]) & 1
    return (1 - 2 * parity.astype(np.float32)).astype(np.float32)
