"""Messages to a tree."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._inputs.policy import paths_of
from dynamiq_jax.islands import _gathered
from dynamiq_jax.islands._sparse import Sparse
from dynamiq_jax.islands.messages.decoding import leaves_of, weighted_sum
from dynamiq_jax.islands.messages.formats import Format
from dynamiq_jax.islands.messages.message import Leaf, Message
from dynamiq_jax.methods import METHODS, ChunkedMethod


def decode(*messages: Message, weights: Sequence[float] | None = None, like: Any = None) -> Any:
    """Decode a message, or the sum of several.

    The result has the bits of `islands.messages.decode`, which needs no JAX and specifies the sum,
    on all hardware that rounds float32 products by IEEE 754. Tests compare the bits on CPUs. Only
    rows of 256 whose largest magnitude is below 2^-118 may differ, on hardware that keeps subnormal
    numbers.

    Args:
      messages: messages of the same leaves, perhaps of different methods.
      weights: factor of each message, for floating leaves alone; None for a plain sum.
      like: pytree with the paths and shapes of the messages: the tree of `encode`, or a tree of
        values with a `shape` in place of its arrays. None to restore no structure.

    Returns:
      A tree like `like`, or a dictionary from the paths of leaves to arrays.

    Raises:
      TypeError: an argument that is no message.
      ValueError: no message, messages of other leaves than the first, weights that do not fit, a
        tree of other leaves, or leaves of 64 bits without `jax_enable_x64`.

    >>> from dynamiq_jax import islands
    >>> tree = {"w": jnp.ones((512, 64)), "b": jnp.arange(3.0)}
    >>> one, other = (islands.encode(tree, key=jax.random.key(island)) for island in range(2))
    >>> decode(one, other, weights=(0.25, 0.75), like=tree)["b"].tolist()
    [0.0, 1.0, 2.0]
    """
    # Each operation is a program of its own: fused with an addition, a product rounds once.
    leaves = weighted_sum(messages, weights, _leaves_of, lambda leaf: leaf)
    pairs = zip(messages[0].leaves, leaves, strict=True)
    arrays = {leaf.name: values.astype(jnp.dtype(leaf.dtype)) for leaf, values in pairs}
    if like is None:
        return arrays
    _check_like(messages[0].leaves, like)
    return jax.tree.unflatten(jax.tree.structure(like), arrays.values())


def _leaves_of(message: Message) -> list[Array]:
    """Decode all leaves; ValueError for those of 64 bits where JAX has none."""
    for leaf in message.leaves:
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != np.dtype(leaf.dtype):
            raise ValueError(
                f"the leaf {leaf.name!r} of a message has dtype {leaf.dtype}. Set "
                "jax.config.update('jax_enable_x64', True), or decode it with "
                "dynamiq_jax.islands.messages.decode."
            )
    return [jnp.asarray(leaf) for leaf in leaves_of(message, _decoded)]


@functools.partial(jax.jit, static_argnames=("form", "size"))
def _decoded(arrays: Sequence[Array], form: Format, size: int) -> Array:
    """Decode a bucket: float32, the coordinates and some padding."""
    fields = dict(vars(form))
    name = fields.pop("method")
    method = (Sparse if name == "sparse" else METHODS[name])(**fields)
    assert isinstance(method, ChunkedMethod)
    return _gathered.received(method, -(-size // method.granule) * method.granule, arrays)


def _check_like(leaves: Sequence[Leaf], like: Any) -> None:
    """Raise ValueError for a tree of other leaves than a message."""
    wanted = zip(paths_of(like), map(np.shape, jax.tree.leaves(like)), strict=True)
    for given, other in itertools.zip_longest((leaf[:2] for leaf in leaves), wanted):
        if given != other:
            raise ValueError(
                f"the message has the leaf {given or 'none'}, where like has {other or 'none'}. "
                "Give the tree that was encoded, or one like it."
            )
