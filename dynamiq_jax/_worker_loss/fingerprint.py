"""Keys that follow from the bits of arrays, for calls without a key."""

import collections
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from dynamiq_jax._buckets.leaves import named_leaves
from dynamiq_jax._inputs.shards import P, find_shards
from pallas_kernels._jax.own_thread import is_traced
from pallas_kernels.codec.rounding import mix


def key_of(tree: Any, specs: Any) -> Array:
    """Return a PRNG key that changes with any bit of a tree.

    The key is the same on all devices that hold the same tree, also where leaves are split. Sums of
    integers are exact in any order. Leaves of dtype float0 hold nothing.

    Args:
      tree: pytree of arrays.
      specs: split of the leaves over axes that are not manual here; see `find_shards`.
    """
    named, _ = named_leaves(tree)
    leaves = [leaf for _, leaf in named]
    shards = find_shards([name for name, _ in named], leaves, tree, specs)
    held = {number: leaf for number, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0}

    def local(leaves: dict[int, Array]) -> Array:
        words = [
            _word_of_parts(leaf, number, shards.axes_of(number)) for number, leaf in leaves.items()
        ]
        return sum(map(mix, words), start=jnp.uint32(0))

    split = {number: shards.specs[number] for number in held}
    word = shards.map(local, in_specs=(split,), out_specs=P())(held)
    return jax.random.fold_in(jax.random.key(0), word)


_TRACES = 64  # traces whose calls a thread counts, open ones and closed ones


class _Calls(threading.local):
    """Numbers of calls in the last traces of a thread, by name of the function."""

    def __init__(self) -> None:
        self.of_traces: collections.deque[tuple[Any, collections.Counter[str]]]
        self.of_traces = collections.deque(maxlen=_TRACES)


_calls = _Calls()


def salt_of_call(called: str) -> np.uint32:
    """Return a number for a call of a function, different for each of its calls in one trace.

    The number is the same in all processes that trace the same program. Outside of any trace it is
    the number of a first call, so that a call can be repeated.

    Args:
      called: name of the function, such as a loss, and its static arguments.
    """
    here = get_opaque_trace_state()
    counts = next((counts for trace, counts in _calls.of_traces if trace == here), None)
    if counts is None:
        counts = collections.Counter[str]()
        if is_traced():
            _calls.of_traces.append((here, counts))
    number = counts[called]
    counts[called] += 1
    digest = hashlib.sha256(f"{number} {called}".encode()).digest()
    return np.frombuffer(digest, "<u4")[0]


def word_of(leaves: Sequence[Array], axis_names: Sequence[str]) -> Array:
    """Return a hash of all bits, uint32, of arrays whose parts are on the workers of some axes."""
    words = [_word_of_parts(leaf, number, axis_names) for number, leaf in enumerate(leaves)]
    return sum(map(mix, words), start=jnp.uint32(0))


def joint_word_of(leaves: Sequence[Array], axis_names: Sequence[str]) -> Array:
    """Return a hash of arrays of all workers of some axes: uint32, one message for each axis."""
    word = jax.jit(_word)  # JAX traces it once for all leaves of a shape
    own = [mix(word(leaf, np.uint32(number))) for number, leaf in enumerate(leaves)]
    return _over_axes(sum(own, start=jnp.uint32(0)), axis_names)


def _word_of_parts(leaf: Array, number: int, axis_names: Sequence[str]) -> Array:
    """Return a hash of a number and a leaf whose parts are on the devices of some axes."""
    return _over_axes(_word(leaf, jnp.uint32(number)), axis_names)


def _over_axes(word: Array, axis_names: Sequence[str]) -> Array:
    """Return a hash of the words of all devices of some axes."""
    for axis in axis_names:
        place = mix(lax.axis_index(axis).astype(jnp.uint32) + np.uint32(1))
        word = lax.psum(mix(word ^ place), axis)
    return word


def _word(leaf: Array, salt: Array) -> Array:
    """Return a hash of an array, uint32: the sum of its words, each mixed with its place."""
    bits = _bits(leaf)
    # Numbers that are 2^32 places apart may change places without a change of the hash.
    places = jnp.zeros(bits.shape, jnp.uint32)
    for dimension in range(bits.ndim):  # the compiler would gather a flat array
        places = places * np.uint32(bits.shape[dimension] % 2**32) + lax.broadcasted_iota(
            jnp.uint32, bits.shape, dimension
        )
    places = places * np.uint32(0x9E3779B9)
    return jnp.sum(mix(bits ^ mix(places + mix(salt))), dtype=jnp.uint32)


def _bits(leaf: Array) -> Array:
    """Return all bits of an array, uint32, with the words of one number along the last axis."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf).astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_bits(leaf.real), _bits(leaf.imag)])
    if leaf.dtype.itemsize == 8:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return leaf.astype(jnp.uint32)
