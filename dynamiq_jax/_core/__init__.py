"""The parts that methods and topologies share."""

from dynamiq_jax._core.axis import Axis
from dynamiq_jax._core.codec import (
    MOST_IN_BUCKET,
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
from dynamiq_jax._core.validation import (
    MistakeError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_optimizer,
)
