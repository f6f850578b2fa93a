"""Compressed gradient all-reduce for JAX.

- grads = jax.lax.pmean(grads, "data")
+ grads = dq.pmean(grads, "data", key=key)
"""

from dynamiq_jax import methods, topologies, training
from dynamiq_jax._api.autodiff import value_and_grad
from dynamiq_jax._api.bit_allocation import BitAllocation, allocate_bits
from dynamiq_jax._api.collectives import all_gather, pmean, psum, psum_scatter
from dynamiq_jax._api.data_parallel import data_parallel
from dynamiq_jax._api.metrics import vnmse
from dynamiq_jax._api.optimizer import AllReduceState, all_reduce_gradients
from dynamiq_jax._api.replicas import mean_of_replicas
from dynamiq_jax._api.report import LeafReport, WireReport, wire_report
from dynamiq_jax._api.schedule import Schedule
from dynamiq_jax._api.transposed import pcast
from dynamiq_jax._buckets.options import Options
from dynamiq_jax._inspection.inspection import Inspection
from dynamiq_jax._inspection.step import inspect
from dynamiq_jax.methods import BF16, DynamiQ, Exact

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "AllReduceState",
    "BitAllocation",
    "DynamiQ",
    "Exact",
    "Inspection",
    "LeafReport",
    "Options",
    "Schedule",
    "WireReport",
    "all_gather",
    "all_reduce_gradients",
    "allocate_bits",
    "data_parallel",
    "inspect",
    "mean_of_replicas",
    "methods",
    "pcast",
    "pmean",
    "psum",
    "psum_scatter",
    "topologies",
    "training",
    "value_and_grad",
    "vnmse",
    "wire_report",
]
