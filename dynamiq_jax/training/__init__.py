"""Train steps for workers that are far, slow or lossy.

Neither methods nor topologies: these are loops and steps around the collectives, which take any
method. Each is in a file of its own.
"""

from dynamiq_jax.training._bucket_tuner import BucketTrial, StepTimer, tune_bucket_bytes
from dynamiq_jax.training._drop_compute.accumulation import SimulatedClock
from dynamiq_jax.training._drop_compute.calibration import Calibration
from dynamiq_jax.training._drop_compute.law import StragglerLaw
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
from dynamiq_jax.training._moshpit import moshpit_mean
from dynamiq_jax.training._moshpit_law import moshpit_variance
from dynamiq_jax.training._packet_loss.channel import LossyChannel
from dynamiq_jax.training._packet_loss.collectives import LossyCollectives
from dynamiq_jax.training._packet_loss.drift import drift, expected_drift
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
    "LossyChannel",
    "LossyCollectives",
    "Pipelined",
    "PipelinedReport",
    "PipelinedState",
    "PipelinedUpdate",
    "SimulatedClock",
    "StepTimer",
    "StragglerLaw",
    "ThresholdEffect",
    "choose_threshold",
    "drift",
    "effect_of_threshold",
    "expected_drift",
    "moshpit_mean",
    "moshpit_variance",
    "tune_bucket_bytes",
]
