"""Fused Triton kernels for NVIDIA GPUs from Ampere on.

From the bottom up:

    arithmetic  PTX instructions for elementary operations
    blocks      the rows of one program, and how it is started
    message     words of codes and scales in a message
    rows        rows gathered, decoded and encoded
    backend     the kernels of all operations, and the backend
"""

from pallas_kernels._triton.backend import Triton

__all__ = ["Triton"]
