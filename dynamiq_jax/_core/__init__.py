"""The parts that methods and topologies share.

axis        workers of one axis, and the collectives between them
codec       interface between a method, which codes chunks, and a topology, which carries them
naming      objects from names such as "dynamiq:5"
validation  errors for fields that are not possible
"""

from dynamiq_jax._core.axis import Axis
from dynamiq_jax._core.codec import (
    ByteSpans,
    ChunkCodec,
    LocalChunks,
    Payload,
    RecodedChunks,
    SumCodec,
    SummedChunks,
    WireCost,
    as_chunks,
    take_chunk,
)
from dynamiq_jax._core.validation import check_choice, check_flag, check_integer, check_number
