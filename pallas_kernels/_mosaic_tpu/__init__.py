"""Fused Mosaic kernels for TPUs.

From the bottom up:

    vectors      a block of places in vector registers
    words        a message as words, read and written at any word
    blocks       the places of one step, their widths and their levels
    message      the part of a block in a message
    rows         values of a block to codes and back
    transfers    rows between HBM and the vectors of a block
    launch       how a kernel is started
    widths       norms of rows, energies of sums, and the widths that follow
    backend      the kernels of the operations on rows, and the backend
"""

from pallas_kernels._mosaic_tpu.backend import MosaicTpu

__all__ = ["MosaicTpu"]
