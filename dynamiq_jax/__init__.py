"""Compressed gradient all-reduce for JAX.

- grads = jax.lax.pmean(grads, "data")
+ grads = dq.pmean(grads, "data", key=key)
"""

from dynamiq_jax.autodiff import value_and_grad
from dynamiq_jax.collectives import pmean, psum
from dynamiq_jax.methods import DynamiQ, Exact
from dynamiq_jax.metrics import vnmse
from dynamiq_jax.optimizer import all_reduce_gradients
from dynamiq_jax.report import WireReport, wire_report

__version__ = "0.1.0"

__all__ = [
    "DynamiQ",
    "Exact",
    "WireReport",
    "all_reduce_gradients",
    "pmean",
    "psum",
    "value_and_grad",
    "vnmse",
    "wire_report",
]
