"""Research: published systems to compare with, and simulations.

There are three levels of trust:

- product: `dynamiq_jax` itself. Use it.
- as published: written with the paper at hand. Use it to compare with.
- reconstruction: written from an abstract. Details may differ from the authors' system, so a
  comparison with it says nothing about theirs.

`LEVELS` has the level of each system here. Names such as `method="thc"` reach the methods.

Nothing of the product imports this package, except the predictions of `dynamiq-jax drop-compute`
about workers whose speed varies. Systems here take public names of the product alone, except
`packet_loss`, a collective of its own.
"""

from typing import Literal

from dynamiq_jax.contrib.arc_top_k import ARCTopK
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
from dynamiq_jax.contrib.stragglers import SimulatedClock, StragglerLaw
from dynamiq_jax.contrib.thc import THC

# Methods, then train steps and simulations.
__all__ = ["EF21M", "THC", "ARCTopK", "EntropyCoded", "FlashCommunication", "GlobalCompensation"]
__all__ += ["Marsit", "OmniReduce", "RandK", "SplitSketch", "TopK"]
__all__ += ["IslandState", "Islands", "ObjectStore", "SharedFolder", "Transport"]
__all__ += ["flower_arrays", "flower_reference", "flower_reply", "flower_strategy"]
__all__ += ["LossyChannel", "LossyCollectives", "drift", "expected_drift"]
__all__ += ["SimulatedClock", "StragglerLaw"]
__all__ += ["moshpit_mean", "moshpit_variance"]
__all__ += ["LEVELS"]

# By the module or package of a system.
LEVELS: dict[str, Literal["as published", "reconstruction"]] = {
    "arc_top_k": "reconstruction",
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
    "stragglers": "as published",
    "thc": "as published",
}
