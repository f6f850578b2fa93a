"""How numbers become bytes. A new method is one file here and one line in `METHODS`.

base             interface of a method
norms            norms over all workers
dynamiq          with its codec of a bucket, and the allocation of bits to widths
exact, bf16      baselines
blockwise        base of block quantizers, with the format of their messages
blockint         block integers
mx               microscaling formats, with their minifloats
flash_communication
thc              with its Hadamard rotation
sparse_blocks    base of methods that sum some blocks
omnireduce, topk_chunked
powersgd
error_feedback   wrapper around any method
"""

from collections.abc import Callable

from dynamiq_jax._core import naming
from dynamiq_jax._methods.base import Method
from dynamiq_jax._methods.bf16 import BF16
from dynamiq_jax._methods.blockint import BlockInt
from dynamiq_jax._methods.dynamiq import DynamiQ
from dynamiq_jax._methods.error_feedback import ErrorFeedback
from dynamiq_jax._methods.exact import Exact
from dynamiq_jax._methods.flash_communication import FlashCommunication
from dynamiq_jax._methods.mx import MXFP4, MXFP6, MXFP8, MXINT8
from dynamiq_jax._methods.omnireduce import OmniReduce
from dynamiq_jax._methods.powersgd import PowerSGD
from dynamiq_jax._methods.thc import THC
from dynamiq_jax._methods.topk_chunked import TopKChunked

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
    "omnireduce": OmniReduce,
    "topk_chunked": TopKChunked,
    "powersgd": PowerSGD,
}

# Methods with other defaults.
PRESETS: dict[str, Callable[[], Method]] = {
    "paper": DynamiQ.paper,
    "qgz": BlockInt.qgz,
    "equarx": BlockInt.equarx,
}

# Methods around another one: WRAPPER+METHOD.
WRAPPERS: dict[str, type[ErrorFeedback]] = {"ef": ErrorFeedback}


def resolve_method(method: Method | str) -> Method:
    """Return a method as given, or the one of a name: [WRAPPER+]METHOD[:BITS][:FIELD=VALUE]...

    Raises:
      ValueError: the name is not known, or an option is not possible.

    >>> resolve_method("dynamiq:4").bits
    4.0
    >>> resolve_method("ef+topk_chunked:2:block_size=512").inner.block_size
    512
    """
    if isinstance(method, Method):
        return method
    known = METHODS | PRESETS
    wrapper, plus, inner = method.rpartition("+") if isinstance(method, str) else ("", "", "")
    if naming.head(inner) in known and (wrapper in WRAPPERS or not plus):
        made = naming.make("method", inner, known)
        return WRAPPERS[wrapper](inner=made) if plus else made
    raise ValueError(
        f"method={method!r} is not known. Give a method such as dq.DynamiQ(bits=5.0), or one of "
        f"{sorted(known)}, such as 'dynamiq:5', or 'ef+' and one of these for error feedback."
    )
