"""Laws of workers whose speed varies."""

from dynamiq_jax.contrib.stragglers.law import StragglerLaw

__all__ = ["StragglerLaw"]
