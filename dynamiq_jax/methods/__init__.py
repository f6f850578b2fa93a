"""Methods: how numbers become bytes. A new one is a file here and a line in `METHODS`."""

from collections.abc import Callable

from dynamiq_jax.methods.base import Method
from dynamiq_jax.methods.bf16 import BF16
from dynamiq_jax.methods.block_int import BlockInt
from dynamiq_jax.methods.dynamiq import DynamiQ
from dynamiq_jax.methods.error_feedback import ErrorFeedback
from dynamiq_jax.methods.exact import Exact
from dynamiq_jax.methods.flash_communication import FlashCommunication
from dynamiq_jax.methods.mx import MXFP4, MXFP6, MXFP8, MXINT8
from dynamiq_jax.methods.omni_reduce import OmniReduce
from dynamiq_jax.methods.power_sgd import PowerSGD
from dynamiq_jax.methods.thc import THC
from dynamiq_jax.methods.top_k_chunked import TopKChunked

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

# Names of the command line for a method with other defaults.
PRESETS: dict[str, Callable[..., Method]] = {
    "paper": DynamiQ.paper,
    "qgz": BlockInt.qgz,
    "equarx": BlockInt.equarx,
}

__all__ = [
    "BF16",
    "METHODS",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "MXINT8",
    "PRESETS",
    "THC",
    "BlockInt",
    "DynamiQ",
    "ErrorFeedback",
    "Exact",
    "FlashCommunication",
    "Method",
    "OmniReduce",
    "PowerSGD",
    "TopKChunked",
    "resolve_method",
]


def resolve_method(method: Method | str) -> Method:
    """A method as given, or the default one of a name in `METHODS`."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]()
    raise ValueError(
        f"method={method!r} is not known. Give a method such as dq.DynamiQ(bits=5.0), or one of "
        f"{sorted(METHODS)}."
    )
