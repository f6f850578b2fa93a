"""Compressed gradient all-reduce for JAX.

A train step that averages gradients over the axis "data" sends them compressed:

  import dynamiq_jax as dq
  step = dq.compress(step, "data")

For one mean of your own choice:

- grads = jax.lax.pmean(grads, "data")
+ grads = dq.pmean(grads, "data")
"""

import importlib.util

# Without JAX, `dynamiq_jax.islands` has the messages alone, which a coordinator reads with NumPy.
if importlib.util.find_spec("jax"):
    from dynamiq_jax import islands, methods, reports, topologies, training
    from dynamiq_jax._api.all_gather import all_gather
    from dynamiq_jax._api.all_reduce_gradients import AllReduceState, all_reduce_gradients
    from dynamiq_jax._api.compress import compress
    from dynamiq_jax._api.keep_memory import keep_memory
    from dynamiq_jax._api.psum import pmean, psum
    from dynamiq_jax._api.psum_scatter import psum_scatter
    from dynamiq_jax._api.vnmse import vnmse
    from dynamiq_jax._api.wire_report import wire_report
    from dynamiq_jax._inputs.compression import Compression
    from dynamiq_jax._inputs.schedule import Schedule
    from dynamiq_jax._inspection.step import inspect
    from dynamiq_jax._rewriting.compressed_step import CompressedStep
    from dynamiq_jax._rewriting.sums import Sum
    from dynamiq_jax.methods import DynamiQ

__version__ = "0.3.0"

__all__ = [
    "AllReduceState",
    "CompressedStep",
    "Compression",
    "DynamiQ",
    "Schedule",
    "Sum",
    "all_gather",
    "all_reduce_gradients",
    "compress",
    "inspect",
    "islands",
    "keep_memory",
    "methods",
    "pmean",
    "psum",
    "psum_scatter",
    "reports",
    "topologies",
    "training",
    "vnmse",
    "wire_report",
]
