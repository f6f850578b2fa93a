"""Some coordinates alone: the largest of each worker, or the same random ones."""

from dynamiq_research.single_coordinates.rand_k import RandK
from dynamiq_research.single_coordinates.top_k import TopK

__all__ = ["RandK", "TopK"]
