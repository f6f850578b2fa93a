"""Fused Mosaic GPU kernels for Hopper and newer, the successor of Pallas's Triton backend.

From the bottom up: `launch`, `blocks`, `message`, `rows`, `backend`.
"""

from pallas_kernels._mosaic_gpu.backend import MosaicGpu

__all__ = ["MosaicGpu"]
