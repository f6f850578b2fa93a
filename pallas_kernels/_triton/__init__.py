"""Fused Triton kernels for NVIDIA GPUs from Ampere on.

From the bottom up: `arithmetic`, `blocks`, `message`, `rows`, `backend`.
"""

from pallas_kernels._triton.backend import Triton

__all__ = ["Triton"]
