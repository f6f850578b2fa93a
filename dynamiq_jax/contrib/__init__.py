"""Research: published systems to compare with, and simulations.

There are three levels of trust:

- product: `dynamiq_jax` itself. Use it.
- as published: written with the paper at hand. Use it to compare with.
- reconstruction: written from an abstract. Details may differ from the authors' system, so a
  comparison with it says nothing about theirs.

`LEVELS` has the level of each system here. Names such as `method="thc"` reach the methods.

Nothing of the product imports this package. Systems here take public names of the product alone,
except `packet_loss`, a collective of its own. A system may have a command, as `drop_compute` does.
"""

from typing import Literal

from dynamiq_jax.contrib.arc_top_k import ARCTopK
from dynamiq_jax.contrib.drop_compute import (
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
from dynamiq_jax.contrib.ef21m import EF21M
from dynamiq_jax.contrib.entropy_coded import EntropyCoded
from dynamiq_jax.contrib.flash_communication import FlashCommunication
from dynamiq_jax.contrib.global_compensation import GlobalCompensation
from dynamiq_jax.contrib.islands import (
    Islands,
    IslandState,
    ObjectStore,
    SharedFolder,
    Transport,
    flower_arrays,
    flower_reference,
    flower_reply,
    flower_strategy,
)
from dynamiq_jax.contrib.marsit import Marsit
from dynamiq_jax.contrib.moshpit import moshpit_mean, moshpit_variance
from dynamiq_jax.contrib.omnireduce import OmniReduce
from dynamiq_jax.contrib.packet_loss import LossyChannel, LossyCollectives, drift, expected_drift
from dynamiq_jax.contrib.single_coordinates import RandK, TopK
from dynamiq_jax.contrib.split_sketch import SplitSketch
from dynamiq_jax.contrib.thc import THC

# Methods, then train steps and simulations.
__all__ = ["EF21M", "THC", "ARCTopK", "EntropyCoded", "FlashCommunication", "GlobalCompensation"]
__all__ += ["Marsit", "OmniReduce", "RandK", "SplitSketch", "TopK"]
__all__ += ["IslandState", "Islands", "ObjectStore", "SharedFolder", "Transport"]
__all__ += ["flower_arrays", "flower_reference", "flower_reply", "flower_strategy"]
__all__ += ["LossyChannel", "LossyCollectives", "drift", "expected_drift"]
__all__ += ["Calibration", "DropCompute", "DropComputeMetrics", "DropComputeState"]
__all__ += ["Latencies", "SimulatedClock", "StragglerLaw", "ThresholdEffect"]
__all__ += ["choose_threshold", "effect_of_threshold"]
__all__ += ["moshpit_mean", "moshpit_variance"]
__all__ += ["LEVELS"]

# By the module or package of a system.
LEVELS: dict[str, Literal["as published", "reconstruction"]] = {
    "arc_top_k": "reconstruction",
    "drop_compute": "as published",
    "ef21m": "as published",
    "entropy_coded": "reconstruction",
    "flash_communication": "as published",
    "global_compensation": "reconstruction",
    "islands": "as published",
    "marsit": "reconstruction",
    "moshpit": "as published",
    "omnireduce": "as published",
    "packet_loss": "reconstruction",
    "single_coordinates": "as published",
    "split_sketch": "reconstruction",
    "thc": "as published",
}
