"""Compressed gradient all-reduce for JAX.

- grads = jax.lax.pmean(grads, "data")
+ grads = dq.pmean(grads, "data", key=key)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamiq_jax.autodiff import value_and_grad
    from dynamiq_jax.collectives import pmean, psum
    from dynamiq_jax.methods import BF16, DynamiQ, Exact
    from dynamiq_jax.metrics import vnmse
    from dynamiq_jax.optimizer import AllReduceState, all_reduce_gradients
    from dynamiq_jax.report import WireReport, wire_report
    from dynamiq_jax.sharded import all_gather, psum_scatter

__version__ = "0.1.0"

# Loaded when first asked for. Methods import pallas_kernels, which imports dynamiq_jax.codec and
# with it this file: it must not need methods in turn.
_SUBMODULES = ("methods", "optimizer", "topologies")
_MODULES = {
    "AllReduceState": "optimizer",
    "BF16": "methods",
    "DynamiQ": "methods",
    "Exact": "methods",
    "WireReport": "report",
    "all_gather": "sharded",
    "all_reduce_gradients": "optimizer",
    "pmean": "collectives",
    "psum": "collectives",
    "psum_scatter": "sharded",
    "value_and_grad": "autodiff",
    "vnmse": "metrics",
    "wire_report": "report",
}

__all__ = [
    "BF16",
    "AllReduceState",
    "DynamiQ",
    "Exact",
    "WireReport",
    "all_gather",
    "all_reduce_gradients",
    "pmean",
    "psum",
    "psum_scatter",
    "value_and_grad",
    "vnmse",
    "wire_report",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
