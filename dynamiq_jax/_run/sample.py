"""Keys that follow from a sample of arrays, for calls without a key.

All workers have the same sums, and so the same key, and another one in each step, since gradients
differ from step to step. This is the one place that says what repeats: arrays whose samples repeat,
as of a step with a learning rate of 0, or of two calls with the same tree, repeat their noise.

A hash of all bits would read every array a second time, and XLA for CPUs would write the mixed bits
of a whole array to memory. So a sample is read: one coordinate of every 251 of an array, and about
256 of a small one. Each row of a gradient of an embedding has one, if it has as many coordinates:
rows of zeros hide no other row. 251 is a prime, so that the sample of a matrix has all columns.

Arrays that differ elsewhere alone share their noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.order import after
from pallas_kernels._jax import compat
from pallas_kernels.codec.rounding import mix


class SampledKey(NamedTuple):
    """Key of a collective that depends on a sample of its terms, too, on all workers."""

    base: Array  # PRNG key, the same on all workers


_STRIDE = 251  # coordinates of an array for each one of the sample
_FEW = 256  # coordinates of the sample from which on a stride is larger than 1


def fold_in_sample(
    key: Array, leaves: Sequence[Array], axis_names: Sequence[str], token: Array | None
) -> Array:
    """Return a key that depends on a sample of arrays on all devices of some axes.

    The devices exchange a hash of four bytes, once the token is available. Without axes, arrays are
    the same everywhere.
    """
    if not leaves:
        return key
    samples = [_bits_of(_sample(leaf)).reshape(-1) for leaf in leaves]
    joined = jnp.concatenate(compat.match_varying(samples, *samples))
    word = after(token, _hash_of(joined))
    if axis_names:
        place = mix(lax.axis_index(tuple(axis_names)).astype(jnp.uint32) + np.uint32(1))
        word = lax.psum(mix(word ^ place), tuple(axis_names))
    return jax.random.fold_in(key, word)


def _sample(leaf: Array) -> Array:
    """Return the sample of an array, a vector."""
    stride = min(leaf.size // _FEW | 1, _STRIDE)
    return lax.slice(leaf.reshape(-1), (0,), (leaf.size,), (stride,))


def _hash_of(words: Array) -> Array:
    """Return a hash of words, uint32 [count]: their sum, each mixed with its place."""
    places = lax.iota(jnp.uint32, words.size) * np.uint32(0x9E3779B9)
    return jnp.sum(mix(words ^ mix(places)), dtype=jnp.uint32)


def _bits_of(leaf: Array) -> Array:
    """Return all bits of an array, uint32, with the words of one number along the last axis."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_bits_of(leaf.real), _bits_of(leaf.imag)])
    if leaf.dtype.itemsize == 8:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return leaf.astype(jnp.uint32)
