"""Leaves of messages, and weighted sums of them, with NumPy alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.islands.messages.formats import Format, flushed
from dynamiq_jax.islands.messages.message import Leaf, Message, dtype_of
from dynamiq_jax.islands.messages.sparse import SparseFormat

Weights = Sequence[float] | None


@np.errstate(all="ignore")  # NaN and Inf surface in values, as in JAX
def decode(*messages: Message, weights: Weights = None) -> dict[str, NDArray[Any]]:
    """Decode a message, or the sum of several, with NumPy: the same bits as `islands.decode`.

    Floating leaves are added in float32 (float64 in its own), in the order of the messages, and
    cast to their dtypes once. Other numbers are added in their dtypes. A boolean is True where any
    is.

    Args:
      messages: messages of the same leaves, perhaps in different formats.
      weights: factor of each message, for floating leaves alone; None for a plain sum.

    Returns:
      Arrays by the paths of their leaves.

    Raises:
      TypeError: an argument that is no `Message`.
      ValueError: no message, messages of other leaves than the first, or weights that do not fit.
    """
    leaves = weighted_sum(messages, weights, _leaves_of, flushed)
    pairs = zip(messages[0].leaves, leaves, strict=True)
    return {leaf.name: values.astype(dtype_of(leaf.dtype)) for leaf, values in pairs}


def weighted_sum(
    messages: Sequence[Message],
    weights: Weights,
    leaves_of: Callable[[Message], Sequence[Any]],
    flush: Callable[[Any], Any],
) -> Sequence[Any]:
    """Add up the leaves of messages, which are arrays; see `decode`.

    `flush` returns an array without subnormal numbers, as the vector units of most hardware
    compute, or as it is where they do.
    """
    _check(messages, weights)
    if len(messages) == 1 and weights is None:
        return leaves_of(messages[0])
    total: Sequence[Any] = ()
    for number, message in enumerate(messages):
        leaves = [
            values.astype(_wide_dtype(leaf.dtype))
            for leaf, values in zip(message.leaves, leaves_of(message), strict=True)
        ]
        if weights is not None:
            factor = weights[number]
            leaves = [flush(flush(leaf) * leaf.dtype.type(factor)) for leaf in leaves]
        if number:
            pairs = zip(total, leaves, strict=True)
            leaves = [flush(flush(sum_) + flush(leaf)) for sum_, leaf in pairs]
        total = leaves
    return total


def leaves_of(
    message: Message, decoded: Callable[[Sequence[NDArray[Any]], Format, int], Any]
) -> list[Any]:
    """Return the leaves of a message, in order.

    `decoded` is a function of what was sent of a bucket, its format and its size to its values.
    """
    found: dict[Leaf, Any] = {}
    for part in message.parts():
        arrays = message.arrays(part)
        if isinstance(part.format, SparseFormat):
            part.format.check(arrays, part.size)
        flat = arrays[0] if part.format is None else decoded(arrays, part.format, part.size)
        ends = np.cumsum([leaf.size for leaf in part.leaves]).tolist()
        for leaf, end in zip(part.leaves, ends, strict=True):
            found[leaf] = flat[end - leaf.size : end].reshape(leaf.shape)
    return [found[leaf] for leaf in message.leaves]


def _leaves_of(message: Message) -> list[NDArray[Any]]:
    return leaves_of(message, lambda arrays, form, size: form.decode(arrays, size))


def _wide_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype in which leaves are added up."""
    return np.dtype("float32") if name in ("float16", "bfloat16") else dtype_of(name)


def _check(messages: Sequence[Any], weights: Any) -> None:
    """Raise an error for messages or weights that make no sum."""
    if not messages:
        raise ValueError("there is no message to decode. Give at least one.")
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(
                f"a message is a {type(message).__name__}. Give what islands.encode or "
                "islands.messages.Message.from_bytes returned."
            )
        for first, leaf in zip(messages[0].leaves, message.leaves, strict=False):
            if first[:-1] != leaf[:-1]:  # all but the bucket
                raise ValueError(f"messages of {first!r:.150} and {leaf!r:.150} have no sum.")
        if len(message.leaves) != len(messages[0].leaves):
            raise ValueError(
                f"messages of {len(messages[0].leaves)} and of {len(message.leaves)} leaves have "
                "no sum. Give messages of the same tree."
            )
    if weights is None:
        return
    if not _are_finite(weights, len(messages)):
        raise ValueError(
            f"weights={weights!r:.80} are not {len(messages)} finite numbers, one for each message."
        )
    for leaf in messages[0].leaves:
        if "float" not in leaf.dtype:
            raise ValueError(
                f"weights={weights!r:.80}, but the leaf {leaf.name!r} has dtype {leaf.dtype}. Give "
                "messages of floating leaves alone, or weights=None."
            )


def _are_finite(weights: Any, count: int) -> bool:
    try:
        values = np.asarray(weights)
    except ValueError:  # of several lengths
        return False
    if values.dtype.kind not in "fiu" or values.shape != (count,):
        return False
    return bool((np.abs(values) <= np.finfo(np.float32).max).all())  # products are in float32
