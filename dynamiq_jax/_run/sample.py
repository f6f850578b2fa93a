"""Keys that follow from a sample of arrays, for calls without a key.

A hash of all bits would read every array a second time, and XLA for CPUs would write the mixed bits
of a whole array to memory. So a sample is read: one coordinate of every 251 of an array, and about
256 of a small one. Each row of a gradient of an embedding has one, if it has as many coordinates:
rows of zeros hide no other row. 251 is a prime, so that the sample of a matrix has all columns.

Noise repeats if the sample does. Arrays that differ elsewhere alone then share their noise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.leaves import named_leaves
from dynamiq_jax._buckets.order import after
from dynamiq_jax._inputs.shards import P, find_shards
from pallas_kernels._jax import compat
from pallas_kernels.codec.rounding import mix


class SampledKey(NamedTuple):
    """Key of a collective that depends on a sample of its terms, too, on all workers."""

    base: Any  # PRNG key, the same on all workers


_STRIDE = 251  # coordinates of an array for each one of the sample
_FEW = 256  # coordinates of the sample from which on a stride is larger than 1


def key_of(tree: Any, specs: Any) -> Array:
    """Return a PRNG key that follows from a sample of a tree, the same on all of its devices.

    Leaves of dtype float0 hold nothing.

    Args:
      tree: pytree of arrays.
      specs: split of the leaves over axes that are not manual here; see `find_shards`.
    """
    named, _ = named_leaves(tree)
    leaves = [leaf for _, leaf in named]
    shards = find_shards([name for name, _ in named], leaves, tree, specs)
    held = {number: leaf for number, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0}

    def local(held: dict[int, Array]) -> Array:
        return fold_in_sample(jax.random.key(0), list(held.values()), shards.axes, None)

    split = {number: shards.specs[number] for number in held}
    return shards.map(local, in_specs=(split,), out_specs=P())(held)


def fold_in_sample(
    key: Array, leaves: Sequence[Array], axis_names: Sequence[str], token: Array | None
) -> Array:
    """Return a key that depends on a sample of arrays on all devices of some axes.

    The devices exchange a hash of four bytes.

    Args:
      key: typed PRNG key, the same on all of these devices.
      leaves: arrays of this device.
      axis_names: the axes; none for arrays that are the same everywhere.
      token: token that the message waits for; see `order.after`.
    """
    if not leaves:
        return key
    samples = [bits_of(_sample(leaf)).reshape(-1) for leaf in leaves]
    for one in {compat.varying_axes(sample): sample for sample in samples}.values():
        samples = compat.match_varying(samples, one)
    word = after(token, hash_of(jnp.concatenate(samples)))
    if axis_names:
        place = mix(lax.axis_index(tuple(axis_names)).astype(jnp.uint32) + np.uint32(1))
        word = lax.psum(mix(word ^ place), tuple(axis_names))
    return jax.random.fold_in(key, word)


def _sample(leaf: Array) -> Array:
    """Return the sample of an array, a vector."""
    stride = min(leaf.size // _FEW | 1, _STRIDE)
    return lax.slice(leaf.reshape(-1), (0,), (leaf.size,), (stride,))


def hash_of(bits: Array, salt: Array | np.uint32 = np.uint32(0)) -> Array:
    """Return a hash of words, uint32 of any shape: their sum, each mixed with its place."""
    # Numbers that are 2^32 places apart may change places without a change of the hash.
    places = jnp.zeros(bits.shape, jnp.uint32)
    for dimension in range(bits.ndim):  # the compiler would gather a flat array
        places = places * np.uint32(bits.shape[dimension] % 2**32) + lax.broadcasted_iota(
            jnp.uint32, bits.shape, dimension
        )
    places = places * np.uint32(0x9E3779B9)
    return jnp.sum(mix(bits ^ mix(places + mix(jnp.uint32(salt)))), dtype=jnp.uint32)


def bits_of(leaf: Array) -> Array:
    """Return all bits of an array, uint32, with the words of one number along the last axis."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf).astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([bits_of(leaf.real), bits_of(leaf.imag)])
    if leaf.dtype.itemsize == 8:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return leaf.astype(jnp.uint32)
