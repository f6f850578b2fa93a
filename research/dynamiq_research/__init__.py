"""Research: published systems to compare with, simulations, and an idea of our own.

There are four levels of trust:

- product: `dynamiq_jax` itself. Use it.
- as published: written with the paper at hand. Use it to compare with.
- reconstruction: written from an abstract. Details may differ from the authors' system, so a
  comparison with it says nothing about theirs.
- of our own: an idea of this project that no default of the product gains from.

`LEVELS` has the level of each system here. Names such as `method="thc"` reach the methods.

`dynamiq_jax` imports nothing of this package. Systems here take its public names alone. A system
may have a command, as `drop_compute` does.
"""

from typing import Literal

from dynamiq_research.arc_top_k import ARCTopK
from dynamiq_research.bit_allocation import BitAllocation, allocate_bits
from dynamiq_research.drop_compute import (
    Calibration,
    DropCompute,
    DropComputeMetrics,
    DropComputeState,
    Latencies,
    SimulatedClock,
    StragglerLaw,
    ThresholdEffect,
    choose_threshold,
    effect_of_threshold,
)
from dynamiq_research.ef21m import EF21M
from dynamiq_research.entropy_coded import EntropyCoded
from dynamiq_research.flash_communication import FlashCommunication
from dynamiq_research.flower import flower_arrays, flower_reference, flower_reply, flower_strategy
from dynamiq_research.global_compensation import GlobalCompensation
from dynamiq_research.marsit import Marsit
from dynamiq_research.moshpit import moshpit_mean, moshpit_variance
from dynamiq_research.omnireduce import OmniReduce
from dynamiq_research.packet_loss import LossyChannel, LossyCollectives, drift, expected_drift
from dynamiq_research.pipelined import Pipelined, PipelinedReport, PipelinedState, PipelinedUpdate
from dynamiq_research.powersgd import PowerSGD
from dynamiq_research.single_coordinates import RandK, TopK
from dynamiq_research.split_sketch import SplitSketch
from dynamiq_research.thc import THC
from dynamiq_research.topk_chunked import SparseBlocks, TopKChunked

# Methods, then bits for them, train steps and simulations.
__all__ = ["EF21M", "THC", "ARCTopK", "EntropyCoded", "FlashCommunication", "GlobalCompensation"]
__all__ += ["Marsit", "OmniReduce", "PowerSGD", "RandK", "SparseBlocks", "SplitSketch", "TopK"]
__all__ += ["TopKChunked"]
__all__ += ["BitAllocation", "allocate_bits"]
__all__ += ["flower_arrays", "flower_reference", "flower_reply", "flower_strategy"]
__all__ += ["LossyChannel", "LossyCollectives", "drift", "expected_drift"]
__all__ += ["Calibration", "DropCompute", "DropComputeMetrics", "DropComputeState"]
__all__ += ["Latencies", "SimulatedClock", "StragglerLaw", "ThresholdEffect"]
__all__ += ["choose_threshold", "effect_of_threshold"]
__all__ += ["Pipelined", "PipelinedReport", "PipelinedState", "PipelinedUpdate"]
__all__ += ["moshpit_mean", "moshpit_variance"]
__all__ += ["LEVELS"]

# By the module or package of a system.
LEVELS: dict[str, Literal["as published", "reconstruction", "of our own"]] = {
    "arc_top_k": "reconstruction",
    "bit_allocation": "of our own",
    "drop_compute": "as published",
    "ef21m": "as published",
    "entropy_coded": "reconstruction",
    "flash_communication": "as published",
    "global_compensation": "reconstruction",
    "flower": "as published",
    "marsit": "reconstruction",
    "moshpit": "as published",
    "omnireduce": "as published",
    "packet_loss": "reconstruction",
    "pipelined": "as published",
    "powersgd": "as published",
    "single_coordinates": "as published",
    "split_sketch": "reconstruction",
    "thc": "as published",
    "topk_chunked": "as published",
}
