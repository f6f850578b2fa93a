"""Public function of the operation `decompress`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.decompress import xla
from pallas_kernels.implementation import resolve

_BACKENDS = {"xla": xla.decompress}


def decompress(payloads: Array, *, layout: Layout, implementation: str | None = None) -> Array:
    """Decodes messages.

    Args:
      payloads: uint8 [chunks, layout.payload_bytes], any number of chunks.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.implementation.resolve`.

    Returns:
      float32 [chunks * rows_per_chunk, 256], rows in the order of the messages.
    """
    return _BACKENDS[resolve(implementation)](payloads, layout=layout)
