"""Public function of the operation `compress`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.compress import mosaic_gpu, triton, xla
from pallas_kernels.implementation import Backends, run

_BACKENDS: Backends = {
    "xla": xla.compress,
    "triton": triton.compress,
    "mosaic_gpu": mosaic_gpu.compress,
}


def compress(
    rows: Array,
    order: Array,
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Encodes one chunk of the local rows.

    Args:
      rows: local bucket in its original order, float [num_rows, 256].
      order: original row of every place, int32 [num_chunks, rows_per_chunk].
      chunk: which chunk.
      turn: number of this compression of the chunk, see section 4 of docs/wire_format.md.
      seed: uint32 [2].
      layout: static layout of the message.
      implementation: backend, see `pallas_kernels.implementation.run`.

    Returns:
      The message, uint8 [layout.payload_bytes].
    """
    return run(implementation, _BACKENDS, rows, order, chunk, turn, seed, layout=layout)
