"""Simulated workers whose speed varies, and the law of their steps."""

from dynamiq_jax.contrib.stragglers.clock import SimulatedClock
from dynamiq_jax.contrib.stragglers.law import StragglerLaw

__all__ = ["SimulatedClock", "StragglerLaw"]
