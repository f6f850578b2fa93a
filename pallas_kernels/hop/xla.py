"""XLA base of `hop`."""

from jax import Array

from dynamiq_jax.codec.layout import Layout
from pallas_kernels.blocks import decode_block, gather
from pallas_kernels.compress.xla import encode_chunk


def hop(
    payloads: Array,
    rows: Array,
    order: Array,
    chunk: Array | int,
    hop_index: Array | int,
    seed: Array,
    *,
    layout: Layout,
) -> Array:
    """See `pallas_kernels.hop.api`."""
    places = order[chunk]
    received = [layout.unpack(payload) for payload in payloads]

    def partial_sum(first: Array | int, count: int) -> Array:
        total = gather(rows, places, first, count)
        for parts in received:
            total = total + decode_block(parts, first, count, layout=layout)
        return total

    return encode_chunk(partial_sum, chunk, hop_index, seed, layout=layout, like=payloads)
