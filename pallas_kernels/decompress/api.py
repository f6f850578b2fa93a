"""Public function of the operation `decompress`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.decompress import mosaic_gpu, triton, xla
from pallas_kernels.implementation import Backends, run

_BACKENDS: Backends = {
    "xla": xla.decompress,
    "triton": triton.decompress,
    "mosaic_gpu": mosaic_gpu.decompress,
}


def decompress(
    payloads: Array, order: Array, *, layout: Layout, implementation: str | None = None
) -> Array:
    """Decodes the messages of all chunks, and puts the rows back where they came from.

    Args:
      payloads: uint8 [num_chunks, layout.payload_bytes].
      order: original row of every place, int32 [num_chunks, rows_per_chunk].
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.implementation.run`.

    Returns:
      float32 [num_rows, 256] in the original order.
    """
    return run(implementation, _BACKENDS, payloads, order, layout=layout)
