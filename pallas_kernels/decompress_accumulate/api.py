"""Public function of the operation `decompress_accumulate`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.decompress_accumulate import mosaic_gpu, triton, xla
from pallas_kernels.implementation import Backends, run

_BACKENDS: Backends = {
    "xla": xla.decompress_accumulate,
    "triton": triton.decompress_accumulate,
    "mosaic_gpu": mosaic_gpu.decompress_accumulate,
}


def decompress_accumulate(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Decodes received messages of a chunk and adds the local rows in float32.

    Args:
      payloads: received partial sums, uint8 [received, layout.payload_bytes].
      rows: local bucket in its original order, float [num_rows, 256].
      order: original row of every place, int32 [num_chunks, rows_per_chunk].
      chunk: which chunk the messages are of.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.implementation.run`.

    Returns:
      The sum, float32 [rows_per_chunk, 256], rows in the order of the message.
    """
    return run(implementation, _BACKENDS, payloads, rows, order, chunk, layout=layout)
