"""Public function of the operation `hop`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.hop import xla
from pallas_kernels.implementation import resolve

_BACKENDS = {"xla": xla.hop}


def hop(
    payload: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    hop_index: Array | int,
    seed: Array,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Decodes a received message, adds the local rows of its chunk in float32, and encodes the sum.

    Args:
      payload: received message, uint8 [layout.payload_bytes].
      rows: local bucket in its original order, float [num_rows, 256].
      order: original row of every place, int32 [num_chunks, rows_per_chunk].
      chunk: which chunk the message is of.
      hop_index: compressions that the chunk has gone through.
      seed: uint32 [2].
      layout: static layout of the message.
      implementation: backend, see `pallas_kernels.implementation.resolve`.

    Returns:
      The message of the new partial sum, uint8 [layout.payload_bytes].
    """
    return _BACKENDS[resolve(implementation)](
        payload, rows, order, chunk, hop_index, seed, layout=layout
    )
