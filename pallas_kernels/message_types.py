"""Messages as bytes and as words of 32 bits.

A byte array on a TPU keeps bytes of other words in one register, so a program carries the type that
its kernels read and write.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_WORD = 4  # bytes


def length(num_bytes: int, dtype: DTypeLike) -> int:
    """Return the elements of a message of some bytes, a multiple of 4."""
    return num_bytes // jnp.dtype(dtype).itemsize


def convert(messages: Array, dtype: DTypeLike) -> Array:
    """Convert messages [..., length] to bytes, uint8, or to words, uint32."""
    if messages.dtype == dtype:
        return messages
    *batch, count = messages.shape
    if dtype == jnp.uint8:
        return lax.bitcast_convert_type(messages, jnp.uint8).reshape(*batch, count * _WORD)
    count //= _WORD
    return lax.bitcast_convert_type(messages.reshape(*batch, count, _WORD), jnp.uint32)


def adapt(function: Callable[..., Any], given: DTypeLike, taken: DTypeLike) -> Callable[..., Any]:
    """Return an operation on messages of type `given` from one on messages of type `taken`.

    A result that is a message gets the type of those that are given, too.
    """
    if given == taken:
        return function

    def operation(payloads: Array, *args: Any, **static: Any) -> Any:
        results = function(convert(payloads, taken), *args, **static)
        return jax.tree.map(
            lambda result: convert(result, given) if result.dtype == taken else result, results
        )

    return operation
