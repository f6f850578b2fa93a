"""Outer steps between jobs that come and go: messages over a store that all of them reach."""

from dynamiq_jax.contrib.islands.islands import Islands, IslandState
from dynamiq_jax.contrib.islands.transports import ObjectStore, SharedFolder, Transport

__all__ = ["IslandState", "Islands", "ObjectStore", "SharedFolder", "Transport"]
