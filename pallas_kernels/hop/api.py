"""Public function of the operation `hop`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.hop import mosaic_gpu, triton, xla
from pallas_kernels.implementation import Backends, run

_BACKENDS: Backends = {
    "xla": xla.hop,
    "triton": triton.hop,
    "mosaic_gpu": mosaic_gpu.hop,
}


def hop(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Decodes received messages of a chunk, adds the local rows in float32, and encodes the sum.

    Args:
      payloads: received partial sums, uint8 [received, layout.payload_bytes]; one in a ring.
      rows: local bucket in its original order, float [num_rows, 256].
      order: original row of every place, int32 [num_chunks, rows_per_chunk].
      chunk: which chunk the messages are of.
      turn: number of this compression of the chunk, see section 4 of docs/wire_format.md.
      seed: uint32 [2].
      layout: static layout of the message.
      implementation: backend, see `pallas_kernels.implementation.run`.

    Returns:
      The message of the new partial sum, uint8 [layout.payload_bytes].
    """
    return run(implementation, _BACKENDS, payloads, rows, order, chunk, turn, seed, layout=layout)
