"""Methods, which turn numbers into bytes, and the parts that a method of your own is made of.

class Float16(ChunkedMethod): ...
dq.psum(gradients, "data", key=key, method=Float16())
"""

from dynamiq_jax._core.axis import Axis
from dynamiq_jax._core.codec import (
    ChunkCodec,
    LocalChunks,
    RecodedChunks,
    SumCodec,
    SummedChunks,
    WireCost,
)
from dynamiq_jax._methods import METHODS, PRESETS, resolve_method
from dynamiq_jax._methods.base import Call, ChunkedMethod, Method, Reduced
from dynamiq_jax._methods.bf16 import BF16
from dynamiq_jax._methods.block_format import BlockFormat
from dynamiq_jax._methods.blockint import BlockInt
from dynamiq_jax._methods.blockwise import BlockwiseMethod
from dynamiq_jax._methods.dynamiq import DynamiQ
from dynamiq_jax._methods.error_feedback import ErrorFeedback, FeedbackState
from dynamiq_jax._methods.exact import Exact
from dynamiq_jax._methods.flash_communication import FlashCommunication
from dynamiq_jax._methods.mx import MXFP4, MXFP6, MXFP8, MXINT8
from dynamiq_jax._methods.omnireduce import OmniReduce
from dynamiq_jax._methods.powersgd import PowerSGD
from dynamiq_jax._methods.sparse_blocks import SparseBlocks
from dynamiq_jax._methods.thc import THC
from dynamiq_jax._methods.topk_chunked import TopKChunked
from dynamiq_jax._topologies.base import Gathered, Scattered

__all__ = [
    "BF16",
    "METHODS",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "MXINT8",
    "PRESETS",
    "THC",
    "Axis",
    "BlockFormat",
    "BlockInt",
    "BlockwiseMethod",
    "Call",
    "ChunkCodec",
    "ChunkedMethod",
    "DynamiQ",
    "ErrorFeedback",
    "Exact",
    "FeedbackState",
    "FlashCommunication",
    "Gathered",
    "LocalChunks",
    "Method",
    "OmniReduce",
    "PowerSGD",
    "RecodedChunks",
    "Reduced",
    "Scattered",
    "SparseBlocks",
    "SumCodec",
    "SummedChunks",
    "TopKChunked",
    "WireCost",
    "resolve_method",
]
