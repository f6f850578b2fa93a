"""A key that follows from the bits of parameters, for callers that know no step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.leaves import named_leaves
from dynamiq_jax._buckets.shards import P, find_shards
from pallas_kernels.codec.rounding import mix


def key_of(tree: Any, specs: Any) -> Array:
    """Return a PRNG key that changes with any floating number of a tree.

    It is the same on all devices that hold the same tree, also where its leaves are split. Sums of
    integers are exact in any order.

    Args:
      tree: pytree of arrays.
      specs: how the leaves are split over axes that are not manual here; see `find_shards`.
    """
    named, _ = named_leaves(tree)
    leaves = [leaf for _, leaf in named]
    shards = find_shards([name for name, _ in named], leaves, tree, specs)
    floating = {
        number: leaf
        for number, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }

    def local(leaves: dict[int, Array]) -> Array:
        total = jnp.uint32(0)
        for number, leaf in leaves.items():
            word = _word_of(leaf.reshape(-1), jnp.uint32(number))
            for axis in shards.axes_of(number):
                place = mix(lax.axis_index(axis).astype(jnp.uint32) + np.uint32(1))
                word = lax.psum(mix(word ^ place), axis)
            total = total + mix(word)
        return total

    split = {number: shards.specs[number] for number in floating}
    word = shards.map(local, in_specs=(split,), out_specs=P())(floating)
    return jax.random.fold_in(jax.random.key(0), word)


def _word_of(flat: Array, salt: Array) -> Array:
    """Return a hash of a vector, uint32: the sum of its words, each mixed with its place."""
    bits = lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.uint32)
    places = lax.iota(jnp.uint32, flat.size) * np.uint32(0x9E3779B9)
    return jnp.sum(mix(bits ^ mix(places + mix(salt))), dtype=jnp.uint32)
