"""DropCompute (arXiv 2306.10598): gradient accumulation that stops at a compute threshold.

`python -m dynamiq_jax.contrib.drop_compute` predicts what a threshold brings.
"""

from dynamiq_jax.contrib.drop_compute.calibration import Calibration
from dynamiq_jax.contrib.drop_compute.clock import SimulatedClock
from dynamiq_jax.contrib.drop_compute.law import StragglerLaw
from dynamiq_jax.contrib.drop_compute.step import (
    DropCompute,
    DropComputeMetrics,
    DropComputeState,
)
from dynamiq_jax.contrib.drop_compute.thresholds import (
    Latencies,
    ThresholdEffect,
    choose_threshold,
    effect_of_threshold,
)

__all__ = ["Calibration", "DropCompute", "DropComputeMetrics", "DropComputeState"]
__all__ += ["Latencies", "SimulatedClock", "StragglerLaw", "ThresholdEffect"]
__all__ += ["choose_threshold", "effect_of_threshold"]
