"""DropCompute (arXiv 2306.10598): gradient accumulation that stops at a compute threshold.

`python -m dynamiq_research.drop_compute` predicts what a threshold brings.
"""

from dynamiq_research.drop_compute.calibration import Calibration
from dynamiq_research.drop_compute.clock import SimulatedClock
from dynamiq_research.drop_compute.law import StragglerLaw
from dynamiq_research.drop_compute.step import DropCompute, DropComputeMetrics, DropComputeState
from dynamiq_research.drop_compute.thresholds import (
    Latencies,
    ThresholdEffect,
    choose_threshold,
    effect_of_threshold,
)

__all__ = ["Calibration", "DropCompute", "DropComputeMetrics", "DropComputeState"]
__all__ += ["Latencies", "SimulatedClock", "StragglerLaw", "ThresholdEffect"]
__all__ += ["choose_threshold", "effect_of_threshold"]
