"""Compression methods. A new one takes one file here and one line in `METHODS`.

_base                     interface of a method
_norms                    norms over all workers
_dynamiq                  with `_dynamiq_codec`, one bucket
_baselines                Exact, BF16
_blockwise                base of block quantizers
_blockint, _flash_communication
_mx                       with `_minifloat`, elements and scales
_thc                      with `_hadamard`, the rotation
_entropy_coded            with `_integer_coders` and `_rans`, codes of THC's integers
_sparse_blocks            base of methods that sum some blocks
_omnireduce
_budget                   bits for each coordinate
_budgeted_blocks          base of those with a number of bits: _topk_chunked, _arc_top_k
_rand_k, _top_k           single coordinates, with `_largest`
_split_sketch             with `_count_sketch`, a summary that is linear
_powersgd
_marsit                   signs
_feedback                 base of wrappers that keep what a method leaves out
_error_feedback, _global_compensation, _ef21m
"""

from collections.abc import Callable

from dynamiq_jax._core import (
    Axis,
    ChunkCodec,
    LocalChunks,
    RecodedChunks,
    SumCodec,
    SummedChunks,
    WireCost,
    naming,
)
from dynamiq_jax.methods._arc_top_k import ARCTopK
from dynamiq_jax.methods._base import Call, ChunkedMethod, Method, Reduced, State
from dynamiq_jax.methods._baselines import BF16, Exact
from dynamiq_jax.methods._blockint import BlockInt
from dynamiq_jax.methods._blockwise import BlockFormat, BlockwiseMethod
from dynamiq_jax.methods._dynamiq import DynamiQ
from dynamiq_jax.methods._ef21m import EF21M
from dynamiq_jax.methods._entropy_coded import EntropyCoded
from dynamiq_jax.methods._error_feedback import ErrorFeedback
from dynamiq_jax.methods._flash_communication import FlashCommunication
from dynamiq_jax.methods._global_compensation import GlobalCompensation
from dynamiq_jax.methods._marsit import Marsit
from dynamiq_jax.methods._mx import MXFP4, MXFP6, MXFP8, MXINT8
from dynamiq_jax.methods._omnireduce import OmniReduce
from dynamiq_jax.methods._powersgd import PowerSGD
from dynamiq_jax.methods._rand_k import RandK
from dynamiq_jax.methods._sparse_blocks import SparseBlocks
from dynamiq_jax.methods._split_sketch import SplitSketch
from dynamiq_jax.methods._thc import THC
from dynamiq_jax.methods._top_k import TopK
from dynamiq_jax.methods._topk_chunked import TopKChunked

# The methods, and the parts that a method of one's own is made of.
__all__ = ["BF16", "EF21M", "MXFP4", "MXFP6", "MXFP8", "MXINT8", "THC", "ARCTopK", "BlockInt"]
__all__ += ["DynamiQ", "EntropyCoded", "ErrorFeedback", "Exact", "FlashCommunication", "OmniReduce"]
__all__ += ["GlobalCompensation", "Marsit", "PowerSGD", "RandK", "SplitSketch", "TopK"]
__all__ += ["TopKChunked"]
__all__ += ["Axis", "BlockFormat", "BlockwiseMethod", "Call", "ChunkCodec", "ChunkedMethod"]
__all__ += ["LocalChunks", "Method", "RecodedChunks", "Reduced", "SparseBlocks", "State"]
__all__ += ["METHODS", "PRESETS", "SumCodec", "SummedChunks", "WireCost", "resolve_method"]

# Names are those of the literature in lower case, with spaces and hyphens as underscores.
METHODS: dict[str, type[Method]] = {
    "dynamiq": DynamiQ,
    "exact": Exact,
    "bf16": BF16,
    "blockint": BlockInt,
    "mxfp8": MXFP8,
    "mxfp6": MXFP6,
    "mxfp4": MXFP4,
    "mxint8": MXINT8,
    "flash_communication": FlashCommunication,
    "thc": THC,
    "entropy_coded": EntropyCoded,
    "omnireduce": OmniReduce,
    "topk_chunked": TopKChunked,
    "arc_top_k": ARCTopK,
    "top_k": TopK,
    "rand_k": RandK,
    "split_sketch": SplitSketch,
    "powersgd": PowerSGD,
    "marsit": Marsit,
}
# Methods with other defaults.
PRESETS: dict[str, Callable[[], Method]] = {
    "paper": DynamiQ.paper,
    "qgz": BlockInt.qgz,
    "equarx": BlockInt.equarx,
}
# Methods around another one, their field `inner`: WRAPPER+METHOD.
WRAPPERS: dict[str, Callable[..., Method]] = {
    "ef": ErrorFeedback,
    "gc": GlobalCompensation,
    "ef21m": EF21M,
}


def resolve_method(method: Method | str) -> Method:
    """Return a method as given, or the one of a name: [WRAPPER+]METHOD[:BITS][:FIELD=VALUE]...

    BITS is the field `bits` or `code_bits`, whichever the method has.

    >>> resolve_method("dynamiq:4").bits
    4
    >>> resolve_method("ef+topk_chunked:2:block_size=512").inner.block_size
    512
    >>> resolve_method("arc_top_k:1:inner=exact").inner
    Exact()
    """
    if isinstance(method, Method):
        return method
    known = METHODS | PRESETS
    wrapper, plus, inner = method.rpartition("+") if isinstance(method, str) else ("", "", "")
    if naming.head(inner) in known and (wrapper in WRAPPERS or not plus):
        hint = " A topology is an argument of its own: topology='ring'."
        made = naming.make("method", inner, known, hint, {"inner": resolve_method})
        try:
            return WRAPPERS[wrapper](inner=made) if plus else made
        except ValueError as error:
            raise ValueError(f"method={method!r}: {error}") from None
    raise ValueError(
        f"method={method!r} is not known. Give a method such as dq.DynamiQ(bits=5.0), or one of "
        f"{sorted(known)}, such as 'dynamiq:5'. One of {sorted(WRAPPERS)} and '+' before it "
        "wraps it: 'ef+' and a method is error feedback, 'gc+' global compensation, "
        "'ef21m+' EF21 with momentum."
    )
