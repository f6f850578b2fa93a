"""Train steps for workers that are far, slow or lossy, around collectives of any method.

`LocalSGD`, `Pipelined` and `DropCompute` have one form:

    output, state = description.update(input, state)     # or step

init(params)        return the first state, a NamedTuple that can be saved and restored
update, step        take a step: an input and a state to an output and the next state, as in optax
state_specs         specs of the state, for `jax.shard_map`
wire_report(params) count the bytes of a step, without running it

The description is frozen. An update or a step takes parameters, a function to gradients, or
micro-batches, and returns parameters, the value of that function, or metrics.
"""

from dynamiq_jax.training import stragglers
from dynamiq_jax.training._bucket_tuner import StepTimer, tune_bucket_bytes
from dynamiq_jax.training._drop_compute.calibration import Calibration
from dynamiq_jax.training._drop_compute.step import (
    DropCompute,
    DropComputeMetrics,
    DropComputeState,
)
from dynamiq_jax.training._local_sgd import LocalSGD, LocalSGDState
from dynamiq_jax.training._pipelined.step import (
    Pipelined,
    PipelinedReport,
    PipelinedState,
    PipelinedUpdate,
)

__all__ = [
    "Calibration",
    "DropCompute",
    "DropComputeMetrics",
    "DropComputeState",
    "LocalSGD",
    "LocalSGDState",
    "Pipelined",
    "PipelinedReport",
    "PipelinedState",
    "PipelinedUpdate",
    "StepTimer",
    "stragglers",
    "tune_bucket_bytes",
]
