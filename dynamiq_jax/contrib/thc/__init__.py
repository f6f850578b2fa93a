"""THC: integers on one grid, which are added without decoding."""

from dynamiq_jax.contrib.thc.method import THC

__all__ = ["THC"]
