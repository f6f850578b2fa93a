"""Selection of the largest of many keys without a sort, which takes 20 times as long on a CPU."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.parts import match_varying

_BITS = 32  # of a key


def largest(keys: Array, count: int) -> Array:
    """Return the places of the largest keys, in increasing order, and of equal ones the first.

    Args:
      keys: uint32 [size].
      count: number of places, from 1 to `size`.

    Returns:
      int32 [count].
    """
    least = _key_of_rank(keys, count)
    above = jnp.cumsum(keys > least, dtype=jnp.int32)
    equal = jnp.cumsum(keys == least, dtype=jnp.int32)
    chosen_before = above + jnp.minimum(equal, count - above[-1])  # and the place itself
    wanted = jnp.arange(1, count + 1, dtype=jnp.int32)
    return jnp.searchsorted(chosen_before, wanted).astype(jnp.int32)


def _key_of_rank(keys: Array, rank: int) -> Array:
    """Return the key that `rank` keys are not below, uint32: the largest such number."""

    def step(number: Array, reached: Array) -> Array:
        tried = reached | (np.uint32(1) << (_BITS - 1 - number).astype(jnp.uint32))
        return jnp.where(jnp.sum(keys >= tried, dtype=jnp.int32) >= rank, tried, reached)

    return lax.fori_loop(0, _BITS, step, match_varying(jnp.uint32(0), keys))
