"""The largest coordinates as they are, and a linear sketch of the others."""

from dynamiq_jax.contrib.split_sketch.method import SplitSketch

__all__ = ["SplitSketch"]
