"""Compression methods, and the interface of a method of one's own.

`dynamiq_research` has further published systems. `resolve_method` finds both by name.
"""

from dynamiq_jax._core import Axis, ChunkCodec, RecodedChunks, SummedChunks, WireCost
from dynamiq_jax.methods._base import Call, ChunkedMethod, Method, Reduced, State
from dynamiq_jax.methods._baselines import BF16, Exact
from dynamiq_jax.methods._blockint import BlockInt
from dynamiq_jax.methods._blockwise import BlockFormat, BlockwiseMethod
from dynamiq_jax.methods._dynamiq import DynamiQ
from dynamiq_jax.methods._error_feedback import ErrorFeedback
from dynamiq_jax.methods._mx import MXFP4, MXFP6, MXFP8, MXINT8
from dynamiq_jax.methods._registry import METHODS, known_methods, resolve_method

__all__ = ["BF16", "MXFP4", "MXFP6", "MXFP8", "MXINT8", "BlockInt", "DynamiQ", "ErrorFeedback"]
__all__ += ["Exact"]
# Interfaces, and bases of methods of one's own. `dynamiq_jax.parts` has more.
__all__ += ["Axis", "BlockFormat", "BlockwiseMethod", "Call", "ChunkCodec", "ChunkedMethod"]
__all__ += ["Method", "RecodedChunks", "Reduced", "State", "SummedChunks"]
__all__ += ["WireCost"]
__all__ += ["METHODS", "known_methods", "resolve_method"]
