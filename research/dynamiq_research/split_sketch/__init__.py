"""The largest coordinates as they are, and a linear sketch of the others."""

from dynamiq_research.split_sketch.method import SplitSketch

__all__ = ["SplitSketch"]
