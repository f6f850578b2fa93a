"""Chunk-wise top-k, and the bases of methods that sum some blocks of a bucket."""

from dynamiq_research.topk_chunked.budget import BudgetedBlocks, check_bits, most_within
from dynamiq_research.topk_chunked.method import TopKChunked
from dynamiq_research.topk_chunked.sparse_blocks import NOT_FINITE, Chosen, SparseBlocks

__all__ = ["TopKChunked"]
__all__ += ["NOT_FINITE", "BudgetedBlocks", "Chosen", "SparseBlocks", "check_bits", "most_within"]
