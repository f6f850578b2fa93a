"""Messages as bytes, as words of 32 bits, and as units of 16 bits in kernels for GPUs.

A byte array on a TPU keeps bytes of other words in one register, so a program carries the type that
its kernels read and write.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_WORD = 4  # bytes


def convert(messages: Array, dtype: DTypeLike) -> Array:
    """Convert messages [..., length] to bytes, uint8, or to words, uint32."""
    if messages.dtype == dtype:
        return messages
    *batch, count = messages.shape
    if dtype == jnp.uint8:
        return lax.bitcast_convert_type(messages, jnp.uint8).reshape(*batch, count * _WORD)
    count //= _WORD
    return lax.bitcast_convert_type(messages.reshape(*batch, count, _WORD), jnp.uint32)


def as_units(payloads: Array) -> Array:
    """View bytes, uint8 [..., bytes], in units of 16 bits, which divide every section."""
    return lax.bitcast_convert_type(payloads.reshape(*payloads.shape[:-1], -1, 2), jnp.uint16)


def of_units(message: Array) -> Array:
    """Invert `as_units`, for one message."""
    return lax.bitcast_convert_type(message, jnp.uint8).reshape(-1)
