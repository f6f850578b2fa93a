"""XLA base of `hop`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.blocks import partial_sum
from pallas_kernels.compress.xla import encode_chunk


def hop(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    turn: Array | int,
    seed: Array,
    *,
    layout: Layout,
) -> Array:
    """See `pallas_kernels.hop.api`."""
    total = partial_sum(payloads, rows, order[chunk], layout=layout)
    return encode_chunk(total, chunk, turn, seed, layout=layout, like=payloads)
