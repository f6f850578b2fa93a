"""Train steps for workers that are far, slow or lossy.

Neither methods nor topologies: these are loops and steps around the collectives, which take any
method. Each is in a file of its own.
"""

from dynamiq_jax.training._bucket_tuner import BucketTrial, StepTimer, tune_bucket_bytes
from dynamiq_jax.training._drop_compute.accumulation import SimulatedClock
from dynamiq_jax.training._drop_compute.calibration import Calibration
from dynamiq_jax.training._drop_compute.model import (
    Latencies,
    ThresholdEffect,
    choose_threshold,
    effect_of_threshold,
)
from dynamiq_jax.training._drop_compute.step import (
    DropCompute,
    DropComputeMetrics,
    DropComputeState,
)
from dynamiq_jax.training._local_sgd import Due, LocalSGD, LocalSGDState
from dynamiq_jax.training._pipelined import (
    Pipelined,
    PipelinedReport,
    PipelinedState,
    PipelinedUpdate,
)

__all__ = [
    "BucketTrial",
    "Calibration",
    "DropCompute",
    "DropComputeMetrics",
    "DropComputeState",
    "Due",
    "Latencies",
    "LocalSGD",
    "LocalSGDState",
    "Pipelined",
    "PipelinedReport",
    "PipelinedState",
    "PipelinedUpdate",
    "SimulatedClock",
    "StepTimer",
    "ThresholdEffect",
    "choose_threshold",
    "effect_of_threshold",
    "tune_bucket_bytes",
]
