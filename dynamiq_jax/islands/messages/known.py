"""Formats by the names of their methods."""

from typing import Any

from dynamiq_jax.islands.messages.formats import (
    BlockIntFormat,
    DynamiQFormat,
    MXFormat,
    WordFormat,
)
from dynamiq_jax.islands.messages.sparse import SparseFormat

FORMATS: dict[str, type[Any]] = {
    "dynamiq": DynamiQFormat,
    "exact": WordFormat,
    "bf16": WordFormat,
    "blockint": BlockIntFormat,
    **dict.fromkeys(("mxfp8", "mxfp6", "mxfp4", "mxint8"), MXFormat),
    "sparse": SparseFormat,
}
