"""Fused Mosaic GPU kernels for Hopper and newer, the successor of Pallas's Triton backend.

From the bottom up:

    launch   layouts of a warpgroup, and how a kernel is started
    blocks   the rows of one program
    message  their part of a message
    rows     from memory to a message and back
    backend  the kernels of all operations, and the backend
"""

from pallas_kernels._mosaic_gpu.backend import MosaicGpu

__all__ = ["MosaicGpu"]
