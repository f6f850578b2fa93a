"""Outer steps between jobs that come and go: messages over a store, or through Flower."""

from dynamiq_jax.contrib.islands.flower import (
    flower_arrays,
    flower_reference,
    flower_reply,
    flower_strategy,
)
from dynamiq_jax.contrib.islands.islands import Islands, IslandState
from dynamiq_jax.contrib.islands.transports import ObjectStore, SharedFolder, Transport

__all__ = ["IslandState", "Islands", "ObjectStore", "SharedFolder", "Transport"]
__all__ += ["flower_arrays", "flower_reference", "flower_reply", "flower_strategy"]
